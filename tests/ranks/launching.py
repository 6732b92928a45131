"""What the tests of several ranks share."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WITHIN_S = 300.0
"""A rank that has not ended by then hangs. Nothing takes nearly so long, on a busy machine either."""


def _launcher() -> Any:
    """bench/ranks/launch.py, by its path: names such as `train` are not to be found by other tests."""
    spec = importlib.util.spec_from_file_location("bench_ranks_launch", ROOT / "bench" / "ranks" / "launch.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


launch = _launcher().launch
Ranks = Callable[..., list[Any]]
"""Runs a command as several ranks; what is returned has `status`, `out` and `err` for each."""
