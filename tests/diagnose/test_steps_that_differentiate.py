"""Optimizers whose step computes its own derivatives: no parameter ever has a `.grad`, and all are trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


class Newton(torch.optim.Optimizer):
    def __init__(self, params: Any, through_data: bool) -> None:
        super().__init__(params, {"through_data": through_data})

    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        group = self.param_groups[0]
        with torch.enable_grad():
            loss = closure()
            slopes = torch.autograd.grad(loss, group["params"])
        with torch.no_grad():
            for p, slope in zip(group["params"], slopes, strict=True):
                (p.data if group["through_data"] else p).sub_(slope, alpha=0.1)
        return loss.detach()


@pytest.mark.parametrize("through_data", [False, True])
def test_they_are_no_incident(through_data: bool, guard: Guard) -> None:
    def script() -> None:
        before, model = nn.Linear(3, 1), nn.Linear(3, 1)
        first = torch.optim.Adam(before.parameters())
        x, y = torch.randn(16, 3), torch.randn(16, 1)
        for _ in range(4):
            first.zero_grad()
            nn.functional.mse_loss(before(x), y).backward()
            first.step()
        opt = Newton(model.parameters(), through_data)
        for _ in range(12):
            opt.step(lambda: nn.functional.mse_loss(model(x), y))

    run = guard(script)
    assert (run.faults, run.causes) == (0, [])


def test_one_whose_step_does_nothing_is(guard: Guard) -> None:
    def script() -> None:
        model, head = nn.Linear(3, 4), nn.Linear(4, 1)
        body = torch.optim.SGD(model.parameters(), 0.1)
        opt = torch.optim.SGD(head.parameters(), 0.1)
        for _ in range(12):
            hidden = model(torch.randn(16, 3)).detach()
            opt.zero_grad()
            body.zero_grad()
            head(hidden).square().mean().backward()
            opt.step()
            body.step()

    assert guard(script).causes == ["no-gradients"]
