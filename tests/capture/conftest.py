"""Trainings run in this process, on one thread, with and without the guard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from watching import Watched, watched

torch.set_num_threads(1)


@pytest.fixture
def guard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Watched]:
    """Run a function under `ampguard.watch` and return what came of it."""

    def run(body: Callable[[], object], **options: object) -> Watched:
        return watched(body, tmp_path / "run", capsys, **options)

    return run
