"""Where float32 has to reach from the loss back to the first layers, it is the model that leaves autocast, and no container."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from watching import Watched

Guard = Callable[..., Watched]


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 12, 12) / 12**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,ijk,bj->bk", x, self.weight, x)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"b{i}": Square() for i in range(4)})
        self.fc = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.layers:
            x = self.layers[name](x)
        return self.fc(x.float() / 100)


def train() -> None:
    torch.manual_seed(0)
    net = Tower()
    optimizer = torch.optim.SGD(net.parameters(), 1e-6)
    for step in range(3):
        x = torch.randn(8, 12) * (1.3 if step == 2 else 0.3)
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(net(x), torch.zeros(8, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_the_model_is_what_leaves_autocast(guard: Guard) -> None:
    run = guard(train)
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.step, run.first.module) == ("fp16-overflow", 2, "layers.b2")
    fix = next(fix for fix in run.first.fixes if fix.action == "force-fp32")
    assert fix.verified
    assert fix.target == ""
    assert 'torch.autocast("cpu", enabled=False)(net)(x)' in fix.how
