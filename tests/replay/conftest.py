"""A failing step is replayed at the moment of its failure, and looked at there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

sys.path.append(str(Path(__file__).parents[1] / "capture"))

import ampguard
from ampguard.capture.record import BadResult
from ampguard.replay.rebuild import Replayer
from ampguard.replay.sandbox import neutral_thread

torch.set_num_threads(1)

Look = Callable[[Replayer, BadResult], Any]
AtFailure = Callable[[Callable[[], object], Look], list[Any]]


@pytest.fixture
def at_failure(tmp_path: Path) -> AtFailure:
    """Run a body under guard; at each bad result call `look` in place of the investigation. What it returned, in order.

    What `look` raises comes out here, and not as a fault of the guard.
    """

    def run(body: Callable[[], object], look: Look) -> list[Any]:
        seen: list[Any] = []
        errors: list[BaseException] = []

        def examine(bad: BadResult) -> None:
            try:
                with neutral_thread():
                    seen.append(look(Replayer(bad, session._recorder), bad))
            except BaseException as error:
                errors.append(error)

        with ampguard.watch(out=tmp_path / "run") as session:
            session._examiner.examine = examine  # type: ignore[method-assign]
            body()
        if errors:
            raise errors[0]
        assert not session._barrier.tripped
        return seen

    return run


@pytest.fixture
def guard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run a function under `ampguard.watch` and return what came of it."""
    from watching import watched

    return lambda body, **options: watched(body, tmp_path / "run", capsys, **options)


@pytest.fixture(autouse=True)
def nothing_stays_on_the_stack() -> Iterator[None]:
    """The tape is a dispatch mode: one that a run leaves behind slows down everything after it."""
    yield
    left = []
    while (mode := _get_current_dispatch_mode()) is not None:
        left.append(mode)
        mode.__exit__(None, None, None)
    assert left == []
