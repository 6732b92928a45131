"""What is looked at as the first update is made has a barrier of its own: a fault in it ends the watch over ranks alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ampguard.run import ranks


def test_a_fault_ends_the_watch_over_ranks_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError("a bug")

    recorder: Any = SimpleNamespace(collectives=SimpleNamespace(on_reduced=None), on_first_update=None)
    faults: list[Exception] = []
    monkeypatch.setattr(ranks.Replicas, "are_any", property(broken))
    watch = ranks.RankWatch(recorder, tmp_path, 0, print, lambda: None, faults.append)
    try:
        recorder.on_first_update()
    finally:
        watch.undo()
    assert [type(fault) for fault in faults] == [ZeroDivisionError]
    assert recorder.on_first_update is None
