"""Failures are made on purpose, in this process, and the diagnosis is compared with what is known."""

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

from emulated_graphs import device_graphs  # noqa: E402  (it lies beside the tests of `capture`)

__all__ = ["device_graphs"]


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
