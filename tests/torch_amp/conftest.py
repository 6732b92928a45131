"""PyTorch's own expectations of AMP, in this process, on one thread, with and without the guard."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

sys.path.append(str(Path(__file__).parents[1] / "capture"))

torch.set_num_threads(1)

Holds = Callable[[Callable[[], Any]], None]


@pytest.fixture
def holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Holds:
    """A body whose assertions hold without the guard holds with it, and returns the same to the last bit."""
    from watching import bits, seed_everything, watched

    def seeded(body: Callable[[], Any]) -> Any:
        seed_everything()
        result = body()
        return repr(bits(result)), bits(torch.get_rng_state())

    def check(body: Callable[[], Any]) -> None:
        plain = seeded(body)
        run = watched(lambda: seeded(body), tmp_path / "run", capsys)
        assert run.faults == 0, run.stderr
        assert run.session._barrier.tripped is False
        assert run.result == plain

    return check


@pytest.fixture(autouse=True)
def nothing_stays_on_the_stack() -> Iterator[None]:
    """The tape is a dispatch mode: one that a run leaves behind slows down everything after it."""
    yield
    left = []
    while (mode := _get_current_dispatch_mode()) is not None:
        left.append(mode)
        mode.__exit__(None, None, None)
    assert left == []
