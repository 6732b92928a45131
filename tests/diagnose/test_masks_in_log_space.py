"""`scores + mask.float().log()`: a mask, whose rows without a key are the failure, and not the logarithm of 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


class Head(nn.Module):
    def __init__(self, log: Callable[[Tensor], Tensor], kind: str) -> None:
        super().__init__()
        self.scores = nn.Linear(8, 5)
        self.log, self.kind = log, kind

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        scores = self.scores(x)
        if self.kind == "logits":
            scores = scores + self.log(allowed.float())
        elif self.kind == "weights":  # no mask: how far the inputs reach, 0 where all are too small
            scores = self.log(torch.relu(scores) * allowed.any(1, keepdim=True))
        out: Tensor = torch.softmax(scores, dim=-1) if self.kind != "log" else torch.log_softmax(scores, -1)
        return out


def trained(log: Callable[[Tensor], Tensor], kind: str, is_bool: bool, bad: int = 4) -> None:
    torch.manual_seed(0)
    model = Head(log, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        allowed = torch.rand(16, 5) < 0.6
        allowed[:, 0] = True
        if step == bad:
            allowed[3] = False
        loss = model(torch.randn(16, 8), allowed if is_bool else allowed.float())[:, 0].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("is_bool", [True, False])
@pytest.mark.parametrize("log", [torch.log, torch.log2])
def test_a_row_without_a_key_is_told(guard: Guard, log: Callable[[Tensor], Tensor], is_bool: bool) -> None:
    run = guard(lambda: trained(log, "logits", is_bool))
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.step) == ("masked-softmax", 4)
    assert "torch.softmax" in run.first.location.code
    assert run.first.evidence["empty_rows"] == 1
    assert run.first.fixes[0].verified


def test_the_logarithm_of_a_weight_that_is_0_stays_one(guard: Guard) -> None:
    run = guard(lambda: trained(torch.log, "weights", True))
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.location.code.split("=")[0].strip()) == ("domain-error", "scores")
