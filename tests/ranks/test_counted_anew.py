"""Iterations are counted anew once a second optimizer is seen; each is compared with its own on the other ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ampguard.run.ranks import RankWatch


def raised(fault: Exception) -> None:
    raise fault


def test_each_check_has_a_number_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[tuple[int, int]] = []
    monkeypatch.setattr(RankWatch, "_check", lambda _, *check: checked.append(check))
    recorder: Any = SimpleNamespace(collectives=SimpleNamespace(on_reduced=None))
    watch = RankWatch(recorder, tmp_path, 0, print, lambda: None, raised)
    try:
        for step in (0, 1, 2, 0, 1, 2, 3, 4, 8, 9, 16):
            watch.iteration_ended(step)
    finally:
        watch.undo()
    assert [step for _, step in checked] == [0, 1, 2, 0, 1, 2, 3, 4, 8, 16]
    assert [number for number, _ in checked] == list(range(10))
