"""A script in float16 that keeps a loss scale of its own, under `--precision fp16`: it is to gain no second one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def own_scaling(first_scale: float) -> tuple[list[float], list[Tensor]]:
    """Multiply, look, divide and halve by hand; the scales in use and the weights at the end."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    scale, scales = first_scale, []
    for _ in range(12):
        x = torch.randn(32, 8)
        with torch.autocast("cpu", dtype=torch.float16):
            out = net(x)
        loss = (out.float() - x[:, :1]).square().mean()
        optimizer.zero_grad()
        (loss * scale).backward()
        scales.append(scale)
        if all(bool(p.grad.isfinite().all()) for p in net.parameters()):
            for p in net.parameters():
                p.grad.div_(scale)
            optimizer.step()
        else:
            scale /= 2
    return scales, [p.detach() for p in net.parameters()]


def test_it_runs_as_it_is_written(overridden: Callable[..., Any]) -> None:
    scales, expected = own_scaling(2.0**22)
    assert scales[-1] < scales[0]
    with overridden("fp16") as session:
        guarded_scales, weights = own_scaling(2.0**22)
    assert guarded_scales == scales
    assert all(map(torch.equal, weights, expected))
    assert session.report.run["did"] == [
        "left the loss scale to the script, which multiplies its losses by 4194304 itself"
    ]
    assert [i.severity for i in session.report.incidents] == ["info"]


def masters_by_hand(scale: float) -> list[Tensor]:
    """A float16 model, masters and gradients copied by the script, as before autocast; the masters at the end."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).half()
    masters = [p.detach().float().requires_grad_() for p in net.parameters()]
    optimizer = torch.optim.SGD(masters, 0.05)
    for _ in range(12):
        x = torch.randn(32, 8)
        loss = (net(x.half()).float() - 20 * x[:, :1]).square().mean()
        net.zero_grad()
        (loss * scale).backward()
        for master, p in zip(masters, net.parameters(), strict=True):
            master.grad = p.grad.float() / scale
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, net.parameters(), strict=True):
                p.copy_(master)
    return [m.detach() for m in masters]


def test_one_over_weights_that_the_script_made_low_stays_its_own(overridden: Callable[..., Any]) -> None:
    expected = masters_by_hand(512.0)
    with overridden("fp16") as session:
        masters = masters_by_hand(512.0)
    assert all(torch.allclose(m, e, rtol=0.02, atol=2e-3) for m, e in zip(masters, expected, strict=True))
    assert "left the loss scale to the script, which multiplies its losses by 512 itself" in session.report.run["did"]
    assert session.report.status == "clean"


def test_a_gained_one_settles_where_gradients_are_copied_to_masters(overridden: Callable[..., Any]) -> None:
    with overridden("fp16") as session:
        masters = masters_by_hand(1.0)
    assert session.report.run["steps_held_off"] > 0
    assert all(bool(m.isfinite().all()) for m in masters)
    assert session.report.status == "clean"
