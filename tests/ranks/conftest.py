"""Two real ranks over gloo, with a hard limit: a hang is a failure within a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, WITHIN_S, TwoRanks, launch


@pytest.fixture
def two_ranks(tmp_path: Path) -> TwoRanks:
    """`two_ranks(*command)`: run a command of Python's as two ranks; a rank that does not end in time fails the test."""

    def run(*command: str) -> list[Any]:
        paths = [str(ROOT / "src"), str(ROOT / "bench" / "ranks"), str(Path(__file__).parent)]
        ended = launch(2, command, tmp_path, WITHIN_S, PYTHONPATH=":".join(paths), AMPGUARD_DEBUG="1")
        hung = [rank for rank, one in enumerate(ended) if one.status is None]
        assert not hung, f"ranks {hung} hung:\n" + "\n".join(ended[rank].err for rank in hung)
        return ended

    return run
