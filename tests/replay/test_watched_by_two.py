"""Two threads that watch their events at the same moment: whatever order they end in, modules are called as before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from ampguard.capture.barrier import FaultBarrier
from ampguard.capture.record import Modes, RngStates, RootCall
from ampguard.replay.live import Watching


class Mode:
    """Counts what it sees."""

    def __init__(self) -> None:
        self.calls = 0

    def end(self) -> None: ...
    def enter_module(self, module: nn.Module) -> None: ...
    def leave_module(self) -> None: ...

    def call_module(self, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.calls += 1
        return original(module, *args, **kwargs)


class Watcher:
    def __init__(self) -> None:
        self.barrier = FaultBarrier(lambda fault: None)
        self.mode = Mode()

    def enter(self, event: Any) -> Mode:
        return self.mode


def root_of(module: nn.Module) -> RootCall:
    modes = Modes(True, False, ())
    return RootCall(0, module, (), {}, modes, RngStates(None, (), None, None), True, [], None, "", 0)


@contextmanager
def in_a_thread(watching: Watching) -> Iterator[None]:
    """Watch in another thread."""
    begun, over = threading.Event(), threading.Event()

    def run() -> None:
        with watching:
            begun.set()
            over.wait(10)

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait(10)
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_calls_are_pytorchs_own_again(first_ends_first: bool) -> None:
    before, model = nn.Module.__call__, nn.Linear(2, 2)
    first, second = Watcher(), Watcher()
    with ExitStack() as second_stack, ExitStack() as first_stack:
        first_stack.enter_context(in_a_thread(Watching(first, root_of(model))))
        second_stack.enter_context(in_a_thread(Watching(second, root_of(model))))
        model(torch.ones(1, 2))
        assert (first.mode.calls, second.mode.calls) == (1, 1)
        (first_stack if first_ends_first else second_stack).close()
    assert nn.Module.__call__ is before
    model(torch.ones(1, 2))
    assert (first.mode.calls, second.mode.calls) == (1, 1)
