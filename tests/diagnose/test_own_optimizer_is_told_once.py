"""An optimizer that is a plain class of the script's: what it does to the weights, and to the next loss, is one failure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


class PlainAdam:
    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = list(parameters)
        self.m = [torch.zeros_like(p) for p in self.parameters]
        self.v = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        for p, m, v in zip(self.parameters, self.m, self.v, strict=True):
            assert p.grad is not None
            m.mul_(0.9).add_(p.grad, alpha=0.1)
            v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            change = m / (v.sqrt() + 1e-8)
            p.sub_(change, alpha=1e-3)
            p.grad = None


def test_the_loss_of_weights_that_were_told(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(40, 8), nn.Flatten(), nn.Linear(32, 3)).half()
        optimizer = PlainAdam(net.parameters())
        for _ in range(6):
            tokens = torch.randint(0, 40, (8, 4))
            nn.functional.cross_entropy(net(tokens).float(), tokens[:, 0] % 3).backward()
            optimizer.step()

    (incident,) = guard(body).report.incidents
    assert incident.location.code == "change = m / (v.sqrt() + 1e-8)"
    assert incident.evidence["later_failures_caused_by_it"] >= 4
