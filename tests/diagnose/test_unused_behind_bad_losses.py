"""Experts that nobody asks because the gate has become NaN are not told as unused parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, seed_everything

Guard = Callable[..., Watched]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x: Tensor, scale: float) -> Tensor:
        p = (self.gate(x) / scale).softmax(-1)
        chosen = [0] * len(x) if bool(p.isnan().any()) else p.argmax(-1).tolist()
        return torch.stack([p[i, k] * self.experts[k](x[i]) for i, k in enumerate(chosen)])


@pytest.mark.parametrize(("bad", "causes"), [(2, ["division-by-zero"]), (None, ["unused-parameters"])])
def test_experts_behind_a_gate(guard: Guard, bad: int | None, causes: list[str]) -> None:
    def body() -> None:
        seed_everything()
        model = Gated()
        with torch.no_grad():
            model.gate.weight.zero_()
            model.gate.bias.copy_(torch.tensor([9.0, 0.0, 0.0]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(20):
            x = torch.randn(5, 4)
            loss = F.cross_entropy(model(x, 0.0 if step == bad else 1.0), torch.randint(2, (5,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.causes == causes
