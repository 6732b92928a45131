"""Trainings run in this process, on one thread, with and without the guard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import _get_current_dispatch_mode
from watching import Watched, watched

import ampguard
from ampguard.incident import Report

torch.set_num_threads(1)


@pytest.fixture
def guard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Watched]:
    """Run a function under `ampguard.watch` and return what came of it."""

    def run(body: Callable[[], object], **options: object) -> Watched:
        return watched(body, tmp_path / "run", capsys, **options)

    return run


@pytest.fixture
def guarded(tmp_path: Path) -> Callable[[Callable[[], Any]], tuple[Any, Report]]:
    """Run a function under `ampguard.watch`, which must not fail, and return its result and the report."""

    def run(body: Callable[[], Any]) -> tuple[Any, Report]:
        with ampguard.watch(out=tmp_path / "run") as session:
            result = body()
        assert session.report is not None
        assert not session._barrier.tripped
        return result, session.report

    return run


@pytest.fixture(autouse=True)
def nothing_stays_on_the_stack() -> Iterator[None]:
    """The tape is a dispatch mode: one that a run leaves behind slows down everything after it."""
    flags = {name: value for name, value in vars(_python_dispatch).items() if name.startswith("_is_in_")}
    yield
    vars(_python_dispatch).update(flags)  # what one test has left wrong is that test's failure, not the next one's
    left = []
    while (mode := _get_current_dispatch_mode()) is not None:
        left.append(mode)
        mode.__exit__(None, None, None)
    while torch._C._len_torch_function_stack():
        left.append(torch._C._pop_torch_function_stack())
    assert left == []
