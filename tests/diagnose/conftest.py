"""Failures are made on purpose, in this process, and the diagnosis is compared with what is known."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "capture"))

torch.set_num_threads(1)


@pytest.fixture
def guard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run a function under `ampguard.watch` and return what came of it."""
    from watching import watched

    return lambda body, **options: watched(body, tmp_path / "run", capsys, **options)
