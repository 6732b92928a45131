"""What a script computes before the first module of a step: is it worth taping in each of them?"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import ampguard
from ampguard.capture.glue import schedule
from ampguard.capture.record import GlueOp

STEPS = 24


def train(session: Any, augment: bool, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A loop that draws its batches and keeps an average of its weights; how many writes to it are recorded in each step."""
    monkeypatch.setattr(schedule, "FREE_SECONDS", 0.0)
    writes: list[int] = []
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(12)])
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        x, y = torch.randn(4, 6), torch.randint(6, (4,))
        loss = F.cross_entropy(model(flipped(x) if augment else x), y)
        events = session._recorder.log.slice().events
        began = session._recorder.log.iteration_start
        added = [e for e in events if type(e) is GlueOp and e.func is torch.ops.aten.add_.Tensor and e.index >= began]
        writes.append(len(added))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                mean.mul_(0.9).add_(weight, alpha=0.1)
    return writes


def flipped(x: Tensor) -> Tensor:
    return torch.where(torch.rand(4, 1) < 0.5, -x, x)


def test_an_average_of_the_weights_is_not_taped_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the batch is drawn in between makes no preprocessing of it."""
    with ampguard.watch(out=tmp_path / "run") as session:
        writes = train(session, False, monkeypatch)
    assert writes[-8:] == [0] * 8
    assert max(writes) > 0


def test_what_a_batch_is_computed_from_is_taped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "PREFIX_OPS", 200)
    with ampguard.watch(out=tmp_path / "run") as session:
        writes = train(session, True, monkeypatch)
        assert not session._barrier.tripped
    assert writes[-8:] == [24] * 8
