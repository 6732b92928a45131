"""A step length from the loss and the norm of its gradients (Polyak's), read while these are scaled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
SCALE = 64.0


def trained(length: Callable[[Tensor, Tensor, Tensor], float]) -> Callable[[], None]:
    """`length` gets the loss, the scaled loss, and the square of the norm of the scaled gradients."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(6, 3)
        opt = torch.optim.SGD(net.parameters(), lr=1.0)
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=SCALE)
        for _ in range(5):
            with torch.autocast("cpu", dtype=torch.float16):
                out = net(torch.randn(16, 6))
            loss = out.float().square().mean()
            opt.zero_grad()
            scaled = scaler.scale(loss)
            scaled.backward()
            square = torch.stack([p.grad.square().sum() for p in net.parameters() if p.grad is not None]).sum()
            opt.param_groups[0]["lr"] = min(length(loss, scaled, square), 1.0)
            scaler.step(opt)
            scaler.update()

    return body


def test_the_norm_is_still_scaled(guard: Guard) -> None:
    run = guard(trained(lambda loss, scaled, square: (loss.detach() / (0.5 * square + 1e-8)).item()))
    assert (run.faults, run.causes) == (0, ["clip-before-unscale"]), run.stderr
    assert run.first.step == 0


@pytest.mark.parametrize(
    "length",
    [
        lambda loss, scaled, square: (loss.detach() / (0.5 * square / SCALE**2)).item(),
        lambda loss, scaled, square: (scaled.detach() / square.sqrt()).item(),
        lambda loss, scaled, square: (loss.detach() / (0.5 * square * (1.0 / SCALE) ** 2)).item(),
    ],
)
def test_what_is_divided_or_scaled_alike(length: Any, guard: Guard) -> None:
    run = guard(trained(length))
    assert (run.faults, run.causes) == (0, []), run.stderr
