"""A module that keeps its loss in an attribute instead of returning it (llama2.c, auxiliary losses of mixtures of experts)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Guard = Callable[..., Any]


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(6, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.score(x)
        self.spread = scores.square().sum().sqrt()  # no derivative where all of them are 0
        return scores.softmax(-1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))
        self.bad = torch.zeros(())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shares = self.gate(x)
        logits = sum(shares[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        assert isinstance(logits, Tensor)
        self.last_loss = F.cross_entropy(logits, y) + 0.01 * self.gate.spread
        self.unread = (logits * 0).sum().log() * logits.sum() * 0  # NaN, and nobody reads it
        return logits


def trained(read: Callable[[Model, Tensor], Tensor], blank: int | None) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(8):
        x, y = torch.randn(10, 6), torch.randint(0, 3, (10,))
        logits = model(x * (step != blank), y)
        loss = read(model, logits)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


READ: list[Callable[[Model, Tensor], Tensor]] = [
    lambda model, logits: model.last_loss,
    lambda model, logits: model.last_loss / 2,
    lambda model, logits: model.last_loss + 0.01 * logits.square().mean(),
]


@pytest.mark.parametrize("read", READ)
def test_a_gradient_of_what_a_module_left(read: Callable[[Model, Tensor], Tensor], guard: Guard) -> None:
    run = guard(lambda: trained(read, blank=5))
    assert run.faults == 0, run.stderr
    incident = run.first
    assert (incident.cause, incident.step, incident.module) == ("singular-gradient", 5, "gate")
    assert incident.location is not None
    assert incident.location.code.startswith("self.spread = ")
    assert any(fix.verified for fix in incident.fixes)


def test_what_nobody_reads_is_no_failure(guard: Guard) -> None:
    run = guard(lambda: trained(lambda model, logits: model.last_loss, blank=None))
    assert (run.faults, run.causes) == (0, []), run.stderr
