"""Scripts are run in processes of their own, plain and guarded, and asked what they saw."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from workbench import Outcome, Workbench


@pytest.fixture
def workbench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path)


@pytest.fixture
def assert_same(workbench: Workbench, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Run a command line plainly and under guard: status, stdout and stderr must be the same, to the letter."""

    if sys.version_info[:2] == (3, 13):  # counts the threads of a process that forks once ours are back
        monkeypatch.setenv("PYTHONWARNINGS", "ignore:This process:DeprecationWarning")

    def check(*words: str, **extra: str) -> Outcome:
        plain = workbench.plain(*words, **extra)
        assert workbench.guarded(*words, **extra) == plain
        return plain

    return check
