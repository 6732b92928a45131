"""Extragradient and optimistic updates of two networks that play against each other, with gradients that carry the scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Guard = Callable[..., Any]


class Extrapolating(torch.optim.SGD):
    """Looks ahead along its gradients, and steps from where it was."""

    def extrapolation(self) -> None:
        held = [p for group in self.param_groups for p in group["params"]]
        self.saved = [p.data.clone() for p in held]
        for p in held:
            p.data.add_(p.grad.data, alpha=-0.01)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"]]
        for p, saved in zip(held, self.saved, strict=True):
            p.data.copy_(saved).add_(p.grad.data, alpha=-0.01)


def players() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    return one, nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


def loss_of(generator: nn.Module, critic: nn.Module, real: Tensor | None) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        made = generator(torch.randn(16, 4))
        out = critic(made if real is None else torch.cat([real, made.detach().float()]))
    return F.softplus(-out.float()).mean() if real is None else F.softplus(out.float() * 0.5).mean()


def extragradient(unscales: bool) -> Callable[[], None]:
    def body() -> None:
        generator, critic = players()
        optimizers = {net: Extrapolating(net.parameters(), lr=0.01) for net in (critic, generator)}
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(8):
            real = torch.randn(16, 8)
            for extrapolates in (True, False):
                for net, optimizer in optimizers.items():
                    optimizer.zero_grad()
                    scaler.scale(loss_of(generator, critic, real if net is critic else None)).backward()
                    if extrapolates and unscales:
                        scaler.unscale_(optimizer)
                    if extrapolates:
                        optimizer.extrapolation()
                    else:
                        scaler.step(optimizer)
                if unscales or not extrapolates:
                    scaler.update()

    return body


def test_looking_ahead_along_scaled_gradients(guard: Guard) -> None:
    run = guard(extragradient(unscales=False))
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.step) == ("bypassed-scaler", 0)
    assert run.first.location.function == "extrapolation"
    assert "unscaled-backward" not in run.causes


def test_looking_ahead_along_true_ones(guard: Guard) -> None:
    run = guard(extragradient(unscales=True))
    assert run.faults == 0, run.stderr
    assert run.causes == []


def optimistic() -> None:
    """2 g - g of before, all with one scale. A bias of the critic has one element."""
    generator, critic = players()
    optimizers = {net: torch.optim.SGD(net.parameters(), lr=0.01) for net in (critic, generator)}
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    last: dict[Tensor, Tensor] = {}
    for _ in range(8):
        real = torch.randn(16, 8)
        for net, optimizer in optimizers.items():
            optimizer.zero_grad()
            scaler.scale(loss_of(generator, critic, real if net is critic else None)).backward()
            for p in net.parameters():
                assert p.grad is not None
                g = p.grad.clone()
                p.grad.mul_(2).sub_(last.get(p, g))
                last[p] = g
            scaler.step(optimizer)
        scaler.update()


def test_copies_of_scaled_gradients_are_no_norms(guard: Guard) -> None:
    run = guard(optimistic)
    assert run.faults == 0, run.stderr
    assert run.causes == []
