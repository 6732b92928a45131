"""Numbers that are read from scaled gradients and by which something is multiplied: where the scale cancels nothing is told."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Guard = Callable[..., Any]
Parameters = list[nn.Parameter]
Again = Callable[[], None]
Look = Callable[[Parameters, Again], None]
SCALE = 4096.0


def trained(look: Look) -> Callable[[], None]:
    """`look` runs behind each backward pass; `again` clears the gradients and makes new ones."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

        def again() -> None:
            optimizer.zero_grad()
            x = torch.randn(16, 8)
            with torch.enable_grad():
                with torch.autocast("cpu", dtype=torch.float16):
                    out = net(x)
                loss = F.cross_entropy(out.float(), (x[:, 0] > 0).long())
                scaler.scale(loss).backward()

        for _ in range(8):
            again()
            with torch.no_grad():
                look(list(net.parameters()), again)
            scaler.step(optimizer)
            scaler.update()

    return body


def grads(parameters: Parameters) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def ascent(factor: Callable[[list[Tensor]], float], moved: Callable[[Tensor, float], Tensor]) -> Look:
    """Sharpness-aware: to the worst point near by and back."""

    def look(parameters: Parameters, again: Again) -> None:
        rate = factor(grads(parameters))
        steps = [moved(g, rate) for g in grads(parameters)]
        for p, step in zip(parameters, steps, strict=True):
            p.add_(step)
        again()
        for p, step in zip(parameters, steps, strict=True):
            p.sub_(step)

    return look


def of_squares(gradients: list[Tensor]) -> float:
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
    return 0.05 / norm


def of_norms(gradients: list[Tensor]) -> float:
    norm = torch.stack([g.norm() for g in gradients]).norm().item()
    return 0.05 / (norm + 1e-12)


def of_tensor(gradients: list[Tensor]) -> float:
    return (0.1 / torch.stack([g.norm() for g in gradients]).norm()).item()


FACTORS = [of_squares, of_norms, of_tensor]
PRODUCTS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "times": lambda g, rate: g * rate,
    "times in front": lambda g, rate: rate * g.data,
    "in place": lambda g, rate: g.clone().mul_(rate),
}


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("product", PRODUCTS)
def test_a_step_of_a_length_that_somebody_has_chosen(guard: Guard, factor: Any, product: str) -> None:
    run = guard(trained(ascent(factor, PRODUCTS[product])))
    assert run.faults == 0, run.stderr
    assert run.causes == []


def along(parameters: Parameters, again: Again) -> None:
    norm = torch.stack([g.norm() for g in grads(parameters)]).norm()
    rate = (0.1 / norm).item()
    before = [p.clone() for p in parameters]
    for p, g in zip(parameters, grads(parameters), strict=True):
        p.data.add_(g, alpha=rate)
    again()
    for p, was in zip(parameters, before, strict=True):
        p.copy_(was)


def test_a_step_by_alpha(guard: Guard) -> None:
    run = guard(trained(along))
    assert run.faults == 0, run.stderr
    assert run.causes == []


def clip_in_place(parameters: Parameters, again: Again) -> None:
    norm = torch.stack([g.norm() for g in grads(parameters)]).norm().item()
    factor = min(1.0, 0.5 / (norm + 1e-6))
    for g in grads(parameters):
        g.mul_(factor)


def clip_anew(parameters: Parameters, again: Again) -> None:
    norm = torch.stack([g.norm() for g in grads(parameters)]).norm().item()
    for p, g in zip(parameters, grads(parameters), strict=True):
        p.grad = g * min(1.0, 0.5 / norm)


def normalise(parameters: Parameters, again: Again) -> None:
    norm = torch.stack([g.norm() for g in grads(parameters)]).norm().item()
    for g in grads(parameters):
        g.mul_(1.0 / norm)


@pytest.mark.parametrize("look", [clip_in_place, clip_anew, normalise])
def test_gradients_that_the_scaler_divides_once_more(guard: Guard, look: Look) -> None:
    run = guard(trained(look))
    assert run.faults == 0, run.stderr
    assert [(i.cause, i.severity, i.step) for i in run.report.incidents] == [("clip-before-unscale", "error", 0)]
    assert run.first.location.function == look.__name__
