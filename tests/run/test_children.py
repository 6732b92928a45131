"""A script that lets processes of its own train is told that nobody watches them."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
from torch import nn

import ampguard
from ampguard.run.children import processes_made


@pytest.mark.parametrize("computes", [False, True])
def test_processes_that_nobody_watches(computes: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = processes_made()
    with ampguard.watch(out=tmp_path / "run"):
        multiprocessing.Process(target=int)
        if computes:  # they are a loader's workers, say
            nn.Linear(2, 2)(torch.ones(1, 2))
    assert processes_made() == before + 1
    said = capsys.readouterr().err
    assert ("torchrun" in said) is not computes
    assert "a fault of its own" not in said
