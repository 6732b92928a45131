"""A loss whose factor is the gradient of cached representations carries the scale; one with another factor does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Guard = Callable[..., Any]


def found(run: Any) -> list[Any]:
    assert run.faults == 0, run.stderr
    return [i for i in run.report.incidents if i.severity != "info"]


def by_sum(z: Tensor, gradient: Tensor) -> Tensor:
    return (z.float() * gradient).sum()


def by_dot(z: Tensor, gradient: Tensor) -> Tensor:
    return torch.dot(z.float().flatten(), gradient.flatten())


def by_einsum(z: Tensor, gradient: Tensor) -> Tensor:
    return torch.einsum("bd,bd->b", z.float(), gradient).mean() * len(z)


def cached(surrogate: Callable[[Tensor, Tensor], Tensor], learns_temperature: bool, scaled: bool = True) -> Any:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))
        temperature = nn.Parameter(torch.ones(()))
        opt = torch.optim.SGD([*net.parameters(), *([temperature] if learns_temperature else [])], lr=0.01)
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=256.0)
        for _ in range(6):
            opt.zero_grad()
            x = torch.randn(16, 6)
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
                kept = net(x).float()
            kept.requires_grad_()
            logits = kept @ kept.T * temperature
            scaler.scale(F.cross_entropy(logits, torch.arange(16).flip(0))).backward()
            gradients = kept.grad if scaled else torch.randn(16, 8)
            for part, gradient in zip(x.split(4), gradients.split(4), strict=True):  # type: ignore[union-attr]
                with torch.autocast("cpu", dtype=torch.float16):
                    z = net(part)
                surrogate(z, gradient).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()

    return body


@pytest.mark.parametrize("learns_temperature", [False, True])
@pytest.mark.parametrize("surrogate", [by_sum, by_dot, by_einsum])
def test_the_gradients_of_cached_representations_go_on(
    surrogate: Callable[[Tensor, Tensor], Tensor], learns_temperature: bool, guard: Guard
) -> None:
    assert found(guard(cached(surrogate, learns_temperature))) == []


@pytest.mark.parametrize("surrogate", [by_sum, by_dot, by_einsum])
def test_the_gradients_of_an_unscaled_loss_carry_no_scale(
    surrogate: Callable[[Tensor, Tensor], Tensor], guard: Guard
) -> None:
    """As GC-DPR does it: the loss of the representations is differentiated as it is, the losses made of its gradients scaled."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))
        opt = torch.optim.SGD(net.parameters(), lr=0.01)
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=256.0)
        for _ in range(6):
            opt.zero_grad()
            x = torch.randn(16, 6)
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
                kept = net(x).float()
            kept.requires_grad_()
            F.cross_entropy(kept @ kept.T, torch.arange(16).flip(0)).backward()
            for part, gradient in zip(x.split(4), kept.grad.split(4), strict=True):  # type: ignore[union-attr]
                with torch.autocast("cpu", dtype=torch.float16):
                    z = net(part)
                scaler.scale(surrogate(z, gradient) * (8 / 8.0)).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()

    assert found(guard(body)) == []


def test_another_constant_factor_carries_no_scale(guard: Guard) -> None:
    """As in an actor's loss beside a critic's: log-probabilities times advantages."""
    (incident,) = found(guard(cached(by_sum, learns_temperature=True, scaled=False)))
    assert (incident.cause, incident.step) == ("unscaled-backward", 0)
