"""A momentum encoder is updated in the middle of each step, by more operators than are taped of a step for long."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, bits, seed_everything

from ampguard.capture.glue import schedule

Guard = Callable[..., Watched]
STEPS, BAD = 16, 13


def in_place(mean: nn.Parameter, weight: nn.Parameter) -> None:
    mean.mul_(0.9).add_(weight, alpha=0.1)


def by_data(mean: nn.Parameter, weight: nn.Parameter) -> None:
    mean.data.mul_(0.9).add_(weight.data, alpha=0.1)


def copied(mean: nn.Parameter, weight: nn.Parameter) -> None:
    mean.data.copy_(0.9 * mean.data + 0.1 * weight.data)


def train(update: Callable[[nn.Parameter, nn.Parameter], None]) -> Any:
    seed_everything()
    query = nn.Sequential(*[nn.Linear(6, 6) for _ in range(30)])
    key = copy.deepcopy(query)
    optimizer = torch.optim.SGD(query.parameters(), lr=0.01)
    for step in range(STEPS):
        x = torch.randn(4, 6)
        q = F.normalize(query(x), dim=1)
        with torch.no_grad():
            for mean, weight in zip(key.parameters(), query.parameters(), strict=True):
                update(mean, weight)
            k = F.normalize(key(x), dim=1)
        logits = q @ k.t() / 0.2
        if step == BAD:
            logits = logits.masked_fill(torch.eye(4) < 2.0, -torch.inf)
        loss = -logits.softmax(1).diagonal().log().mean()
        optimizer.zero_grad()
        loss.backward()
        if loss.isfinite():
            optimizer.step()
    return bits([p.detach() for p in (*query.parameters(), *key.parameters())])


@pytest.mark.parametrize("update", [in_place, by_data, copied])
def test_the_loss_after_it_is_explained_late_in_a_run(
    update: Callable[..., None], guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(update)
    monkeypatch.setattr(schedule, "FREE_SECONDS", 0.0)
    monkeypatch.setattr(schedule, "GLUE_TIME_SHARE", 1e-9)
    run = guard(lambda: train(update))
    assert run.result == plain
    assert run.faults == 0, run.stderr
    first = run.first
    assert (first.cause, first.step, first.op) == ("masked-softmax", BAD, "aten._softmax.default")
    assert first.location is not None
    assert first.location.code.startswith("loss = -logits.softmax(1)")
