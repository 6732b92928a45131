"""A module that calls others before `nn.Module.__init__` has run (BoTorch's models transform their data first)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from watching import Watched

Guard = Callable[..., Watched]


class Scale(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / x.std(0)


class Model(nn.Module):
    def __init__(self, data: Tensor, transform: nn.Module) -> None:
        transformed = self.transformed(data, transform)
        super().__init__()
        self.transform = transform
        self.layer = nn.Linear(transformed.shape[1], 1)

    def transformed(self, data: Tensor, transform: nn.Module) -> Tensor:
        result: Tensor = transform(data)
        return result

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(self.transform(x))
        return result


def test_module_called_by_one_that_is_not_built_yet(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        data = torch.randn(8, 3)
        model = Model(data, Scale())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            loss = model(data).square().mean()
            if step == 2:
                loss = torch.log(loss * 0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0
    assert run.causes[0] == "domain-error"
    assert run.first.step == 2
