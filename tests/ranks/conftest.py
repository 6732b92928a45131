"""Two or four ranks over gloo, each a process, with a hard limit: a hang is a failure within minutes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, WITHIN_S, Ranks, launch

import warm


@pytest.fixture
def two_ranks(tmp_path: Path) -> Ranks:
    """`two_ranks(*command)`: run a command of Python's as two ranks; a rank that does not end in time fails the test."""
    return lambda *command: run(2, command, tmp_path)


@pytest.fixture
def four_ranks(tmp_path: Path) -> Ranks:
    """The same as four ranks."""
    return lambda *command: run(4, command, tmp_path)


def start(command: Sequence[str], **how: Any) -> Any:
    """A rank imports what it needs by itself only where a guard waits for that."""
    return warm.start(command, modules=warm.TORCH if command[1] == "-m" else warm.RANKS, **how)


def run(ranks: int, command: tuple[str, ...], folder: Path) -> list[Any]:
    paths = [str(ROOT / "src"), str(ROOT / "bench" / "ranks"), str(Path(__file__).parent)]
    ended = launch(ranks, command, folder, WITHIN_S, start, PYTHONPATH=":".join(paths), AMPGUARD_DEBUG="1")
    hung = [rank for rank, one in enumerate(ended) if one.status is None]
    assert not hung, f"ranks {hung} hung:\n" + "\n".join(ended[rank].err for rank in hung)
    return list(ended)
