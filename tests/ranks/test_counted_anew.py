"""Iterations are counted anew once a second optimizer is seen; a number that comes again is not compared again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ampguard.run.ranks import RankWatch


def raised(fault: Exception) -> None:
    raise fault


def test_a_step_is_compared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    monkeypatch.setattr(RankWatch, "_check", lambda _, step: checked.append(step))
    recorder: Any = None
    watch = RankWatch(recorder, tmp_path, 0, print, lambda: None, raised)
    try:
        for step in (0, 1, 2, 0, 1, 2, 3, 4, 8, 9, 16):
            watch.iteration_ended(step)
    finally:
        watch.undo()
    assert checked == [0, 1, 2, 3, 4, 8, 16]
