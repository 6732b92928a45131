"""Updates by hand with gradients of a scaled loss: what overflows only because of the scale is told as that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

Guard = Callable[..., Any]


def adam(scale: float, skips: bool = False, outlier: int | None = None) -> Callable[[], None]:
    """No optimizer at all. `skips`: the script looks by itself, and never lowers the scale."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in net.parameters()]
        for step in range(1, 10):
            for p in net.parameters():
                p.grad = None
            x = torch.randn(16, 8) * (300.0 if step == outlier else 1.0)
            with torch.autocast("cpu", dtype=torch.float16):
                out = net(x)
            scaler.scale(F.cross_entropy(out.float(), (x[:, 0] > 0).long())).backward()
            if skips and not all(bool(p.grad.isfinite().all()) for p in net.parameters() if p.grad is not None):
                continue
            with torch.no_grad():
                for p, (mean, square) in zip(net.parameters(), moments, strict=True):
                    assert p.grad is not None
                    mean.mul_(0.9).add_(p.grad, alpha=0.1)
                    square.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                    mean_now, square_now = mean / (1 - 0.9**step), square / (1 - 0.999**step)
                    p.addcdiv_(mean_now, square_now.sqrt().add_(1e-8), value=-1e-3)

    return body


@pytest.mark.parametrize("skips", [False, True])
def test_a_scale_that_does_not_fit(guard: Guard, skips: bool) -> None:
    run = guard(adam(2.0**24, skips))
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.severity, run.first.step) == ("loss-scale-overflow", "error", 0)
    assert ("lower-loss-scale", True) in {(fix.action, fix.verified) for fix in run.first.fixes}


def test_a_scale_that_does_not_fit_one_batch(guard: Guard) -> None:
    run = guard(adam(2.0**14, outlier=7))
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.severity, run.first.step) == ("loss-scale-overflow", "error", 6)


def test_a_scale_that_fits(guard: Guard) -> None:
    run = guard(adam(256.0))
    assert run.faults == 0, run.stderr
    assert run.causes == []
