"""What hooks on parameters add to gradients in the middle of a scaled backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
Put = Callable[[nn.Parameter, Any], Any]


def trained(put: Put, dtype: torch.dtype = torch.float16) -> Callable[[], None]:
    """`put` gets each parameter and the scaler, and registers a hook."""

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=4096.0)
        for p in model.parameters():
            put(p, scaler)
        for _ in range(5):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                out = model(torch.randn(64, 4))
            scaler.scale(out.float().square().mean()).backward()
            scaler.step(opt)
            scaler.update()

    return body


def noise(p: nn.Parameter, scaler: Any) -> None:
    p.register_hook(lambda g: g + 0.01 * torch.randn_like(g))


def noise_drawn_in_place(p: nn.Parameter, scaler: Any) -> None:
    p.register_hook(lambda g: g + torch.empty_like(g).normal_(0, 0.01))


def decay(p: nn.Parameter, scaler: Any) -> None:
    p.register_hook(lambda g: g.add(p.detach(), alpha=0.01))


def decay_behind(p: nn.Parameter, scaler: Any) -> None:
    def hook(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.add_(param.detach(), alpha=0.01)

    p.register_post_accumulate_grad_hook(hook)


@pytest.mark.parametrize("put", [noise, noise_drawn_in_place, decay, decay_behind])
def test_what_carries_no_scale_is_told(put: Put, guard: Guard) -> None:
    run = guard(trained(put))

    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step, incident.severity) == ("unscaled-backward", 0, "error")
    assert "0.01" in incident.location.code
    assert "get_scale()" in incident.fixes[0].how


def scaled_noise(p: nn.Parameter, scaler: Any) -> None:
    p.register_hook(lambda g: g + 0.01 * scaler.get_scale() * torch.randn_like(g))


def masked(p: nn.Parameter, scaler: Any) -> None:
    mask = (torch.rand_like(p) > 0.5).float()
    p.register_hook(lambda g: torch.nan_to_num(g * mask) * 0.5)


def divided(p: nn.Parameter, scaler: Any) -> None:
    p.register_hook(lambda g: (g / scaler.get_scale() + 0.01 * p.detach()) * scaler.get_scale())


def only_looks(p: nn.Parameter, scaler: Any) -> None:
    """The sum becomes no gradient."""

    def hook(g: Tensor) -> None:
        _ = g + 0.01 * torch.randn_like(g)

    p.register_hook(hook)


@pytest.mark.parametrize("put", [scaled_noise, masked, divided, only_looks])
def test_what_is_right_is_left_alone(put: Put, guard: Guard) -> None:
    run = guard(trained(put))

    assert run.faults == 0, run.stderr
    assert not run.report.incidents
