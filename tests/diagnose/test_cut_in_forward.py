"""An optimizer whose parameters get no gradient because a module's own forward pass keeps it from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


class Probed(nn.Module):
    """A head on features that take no gradient."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 2)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "detach":
            return self.head(self.body(x).detach().relu())
        with torch.no_grad():
            features = self.body(x)
        return self.head(features)


def trained(way: str, opts: Callable[[Probed], list[torch.optim.Optimizer]]) -> None:
    torch.manual_seed(0)
    model = Probed(way)
    optimizers = opts(model)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=64.0)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.randn(8, 6)).float().square().mean()
    scaler.scale(loss).backward()
    *trains, last = optimizers
    for optimizer in trains:
        scaler.step(optimizer)
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.step(last)


@pytest.mark.parametrize("way", ["no_grad", "detach"])
def test_beside_an_optimizer_that_trains(way: str, guard: Guard) -> None:
    def both(model: Probed) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (model.head, model.body)]

    run = guard(lambda: trained(way, both))
    assert run.causes == ["no-gradients"]
    assert "turn" not in run.first.explanation
    assert "under `no_grad`, detaches" in run.first.explanation
    assert "let gradients through in the forward pass of `body`" in run.first.fixes[0].how


@pytest.mark.parametrize("way", ["no_grad", "detach"])
def test_alone(way: str, guard: Guard) -> None:
    run = guard(lambda: trained(way, lambda model: [torch.optim.SGD(model.body.parameters(), 0.1)]))
    assert run.causes == ["no-gradients"]
    assert "with a module that holds them" in run.first.explanation
