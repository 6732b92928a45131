"""Replays run the script's code without a word, and without stopping in a debugger; other threads go on as they did."""

from __future__ import annotations

import io
import logging
import pdb
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import Watched, seed_everything

Guard = Callable[..., Watched]
LOGGER = logging.getLogger("script")
calls: list[str] = []


class Stops(nn.Module):
    """Does in its forward pass what people do while they look for a NaN."""

    def __init__(self, asks: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        h = (h - h).log()
        if not torch.isfinite(h).all():
            breakpoint()
            pdb.set_trace()
            LOGGER.warning("not finite")
            if self.asks:
                calls.append(input())
        return h


def train(model: nn.Module, steps: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).mean().backward()


def test_a_replay_stops_in_no_debugger_and_logs_nothing(
    guard: Guard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls.clear()
    monkeypatch.setattr(sys, "breakpointhook", lambda *_, **__: calls.append("breakpoint"))
    monkeypatch.setattr(pdb, "set_trace", lambda *_, **__: calls.append("pdb"))
    mine = sys.breakpointhook, pdb.set_trace, logging.Logger.handle
    run = guard(lambda: train(Stops()))
    assert run.faults == 0
    assert run.causes == ["domain-error"]
    assert run.first.fixes[0].verified
    assert calls == ["breakpoint", "pdb"]
    assert caplog.messages == ["not finite"]
    assert (sys.breakpointhook, pdb.set_trace, logging.Logger.handle) == mine


def test_a_replay_takes_nothing_that_was_typed_for_the_script(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    calls.clear()
    monkeypatch.setattr(sys, "breakpointhook", lambda *_, **__: None)
    monkeypatch.setattr(pdb, "set_trace", lambda *_, **__: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO("first\nsecond\n"))
    run = guard(lambda: train(Stops(asks=True), 2))
    assert run.faults == 0
    assert calls == ["first", "second"]


def test_a_tracer_sees_no_replay(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "breakpointhook", lambda *_, **__: None)
    monkeypatch.setattr(pdb, "set_trace", lambda *_, **__: None)
    seen = []

    def tracer(frame: FrameType, event: str, _: Any) -> None:
        if frame.f_code is Stops.forward.__code__:
            seen.append(event)

    def body() -> bool:
        before = sys.gettrace()
        sys.settrace(tracer)
        try:
            train(Stops())
            return sys.gettrace() is tracer
        finally:
            sys.settrace(before)

    run = guard(body)
    assert run.causes == ["domain-error"]
    assert run.result
    assert seen == ["call"]


def test_other_threads_are_heard(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    is_over, said = threading.Event(), 0

    def beat() -> None:
        nonlocal said
        while not is_over.wait(0.001):
            print("beat")
            said += 1

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(40)))

        def forward(self, x: Tensor) -> Tensor:
            print("forward")
            h = self.layers(x)
            return (h - h).log()

    def body() -> None:
        seed_everything()
        thread = threading.Thread(target=beat)
        thread.start()
        try:
            train(Deep())
        finally:
            is_over.set()
            thread.join()

    run = guard(body)
    assert run.causes == ["domain-error"]
    lines = out.getvalue().split()
    assert lines.count("beat") == said
    assert lines.count("forward") == 1
