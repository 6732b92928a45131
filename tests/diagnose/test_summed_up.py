"""An infinity that was meant for single elements, in a sum over all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Guard = Callable[..., Any]


class Agent(nn.Module):
    """Scores of actions, of which not all are legal."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(5, 4)

    def forward(self, x: Tensor, legal: Tensor) -> Tensor:
        return self.score(x).masked_fill(~legal, float("-inf"))


def trained(loss_of: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Any]:
    def body() -> Any:
        torch.manual_seed(0)
        net = Agent()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        legal = torch.tensor([True, True, False, True]).expand(6, 4)
        for _ in range(3):
            loss = loss_of(net(torch.randn(6, 5), legal), torch.tensor([0, 1, 3, 0, 1, 3]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [p.tolist() for p in net.parameters()]

    return body


def test_label_smoothing_over_masked_classes(guard: Guard) -> None:
    run = guard(trained(lambda scores, y: F.cross_entropy(scores, y, label_smoothing=0.1)))
    assert run.faults == 0, run.stderr
    incident = run.first
    assert (incident.cause, incident.step, incident.op) == ("indeterminate", 0, "aten.sum.dim_IntList")
    assert "label_smoothing=0.1" in incident.location.code
    assert "masked_fill" in incident.explanation
    assert incident.fixes[0].action == "stable-form"
    assert incident.fixes[0].verified


def test_without_it_nothing_is_said(guard: Guard) -> None:
    run = guard(trained(lambda scores, y: F.cross_entropy(scores, y)))
    assert not run.report.incidents
