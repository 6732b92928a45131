"""Averages of gradients that a script keeps from one iteration to the next, before the scaler has divided them or after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
Keep = Callable[[nn.Module, dict[str, Tensor]], None]


def trained(keep: Keep, unscales: bool = False, outlier: int = -1, **scaling: Any) -> Callable[[], None]:
    """`keep` gets the model and a dictionary that lives as long as the training. `outlier`: a batch that overflows."""

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler: Any = torch.amp.GradScaler("cpu", **scaling)
        kept: dict[str, Tensor] = {}
        for it in range(40):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(torch.randn(64, 4))
            loss = out.float().square().mean() * (1e4 if it == outlier else 1.0)
            scaler.scale(loss).backward()
            if unscales:
                scaler.unscale_(opt)
            keep(model, kept)
            scaler.step(opt)
            scaler.update()

    return body


def averaged(model: nn.Module, kept: dict[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        assert p.grad is not None
        kept[name] = kept.get(name, torch.zeros_like(p)) * 0.9 + p.grad * 0.1
        p.grad = p.grad + 2 * kept[name]


def averaged_in_place(model: nn.Module, kept: dict[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        assert p.grad is not None
        kept.setdefault(name, torch.zeros_like(p)).mul_(0.9).add_(p.grad)
        p.grad.copy_(kept[name])


def corrected_by_the_last(model: nn.Module, kept: dict[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        assert p.grad is not None
        now = p.grad.clone()
        p.grad.data = 2 * now - kept.get(name, now)
        kept[name] = now


def only_kept(model: nn.Module, kept: dict[str, Tensor]) -> None:
    """Nothing becomes of it."""
    for name, p in model.named_parameters():
        assert p.grad is not None
        kept[name] = kept.get(name, torch.zeros_like(p)) * 0.9 + p.grad * 0.1


KEEPS = [averaged, averaged_in_place, corrected_by_the_last]


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("interval", [5, 21])
def test_the_scale_grows_meanwhile(keep: Keep, interval: int, guard: Guard) -> None:
    run = guard(trained(keep, init_scale=256.0, growth_interval=interval))

    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.cause, incident.severity) == ("accumulation-broken", "warning")
    assert incident.step == interval
    assert incident.evidence["scales"] == [256.0, 512.0]


@pytest.mark.parametrize("keep", KEEPS[:2])
def test_an_overflow_stays_in_what_is_kept(keep: Keep, guard: Guard) -> None:
    run = guard(trained(keep, outlier=12, init_scale=65536.0))

    incident = run.report.incidents[0]
    assert (incident.cause, incident.severity) == ("accumulation-broken", "error")
    assert incident.step in (12, 13)
    assert "scale-collapse" not in [each.cause for each in run.report.incidents]


@pytest.mark.parametrize("keep", [*KEEPS, only_kept])
def test_a_scale_that_stays(keep: Keep, guard: Guard) -> None:
    assert not guard(trained(keep, init_scale=256.0)).report.incidents


@pytest.mark.parametrize("keep", KEEPS)
def test_unscaled_before_they_are_kept(keep: Keep, guard: Guard) -> None:
    assert not guard(trained(keep, unscales=True, init_scale=256.0, growth_interval=5)).report.incidents


def test_kept_while_the_scale_grows_and_not_used(guard: Guard) -> None:
    assert not guard(trained(only_kept, init_scale=256.0, growth_interval=5)).report.incidents
