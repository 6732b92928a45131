"""Gradients that are still scaled and become part of the loss: gradient penalties, inner steps that are learnt through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Guard = Callable[..., Any]
Penalty = Callable[[tuple[Tensor, ...], Any], Tensor]


def norm(gradients: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([g.norm() for g in gradients]).norm()


def of_scaled(gradients: tuple[Tensor, ...], scaler: Any) -> Tensor:
    return (norm(gradients) / 100 - 1).square()


def of_list(gradients: tuple[Tensor, ...], scaler: Any) -> Tensor:
    inverse = 1.0 / scaler.get_scale()
    return norm(tuple(g * inverse for g in gradients))


def of_norm(gradients: tuple[Tensor, ...], scaler: Any) -> Tensor:
    return norm(gradients) / scaler.get_scale()


def of_squares(gradients: tuple[Tensor, ...], scaler: Any) -> Tensor:
    return torch.stack([g.square().sum() for g in gradients]).sum() * scaler.get_scale() ** -2


def of_inner_step(gradients: tuple[Tensor, ...], scaler: Any) -> Tensor:
    rate = 0.01 / scaler.get_scale()
    return torch.stack([(1.0 - rate * g).square().mean() for g in gradients]).sum()


def of_direction(gradients: tuple[Tensor, ...], scaler: Any) -> Tensor:
    flat = torch.cat([g.flatten() for g in gradients])
    return 1 - F.cosine_similarity(flat, torch.ones_like(flat), dim=0)


def of_foreach(gradients: tuple[Tensor, ...], scaler: Any) -> Tensor:
    return norm(tuple(torch._foreach_div(list(gradients), scaler.get_scale())))


def body(penalty: Penalty, scale: float = 64.0) -> Callable[[], None]:
    def script() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Softplus(), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for _ in range(6):
            x = torch.randn(16, 6)
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(x)
            loss = F.mse_loss(out.float(), x.sum(1, keepdim=True))
            gradients = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
            optimizer.zero_grad()
            scaler.scale(loss + 0.01 * penalty(gradients, scaler)).backward()
            scaler.step(optimizer)
            scaler.update()

    return script


def test_a_penalty_on_scaled_gradients(guard: Guard) -> None:
    run = guard(body(of_scaled))
    assert run.faults == 0
    (incident,) = [i for i in run.report.incidents if i.severity != "info"]
    assert (incident.cause, incident.severity, incident.step) == ("clip-before-unscale", "error", 0)
    assert "torch.autograd.grad(scaler.scale(loss)" in incident.location.code
    assert (incident.evidence["in_loss"], incident.evidence["factor"]) == (True, 64.0)
    assert incident.fixes[0].how.endswith(
        "inv_scale = 1.0 / scaler.get_scale(); gradients = [g * inv_scale for g in gradients]"
    )


def one_of_a_tuple(loss: Tensor, x: Tensor) -> Tensor:
    slope = torch.autograd.grad(
        outputs=loss,
        inputs=x,
        create_graph=True,
    )[0]
    return (slope.norm() - 1).square()


def unpacked(loss: Tensor, x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return (slope.norm() - 1).square()


def within_an_expression(loss: Tensor, x: Tensor) -> Tensor:
    return (torch.autograd.grad(loss, x, create_graph=True)[0].norm(dim=1) - 1).square().mean()


def iterated(loss: Tensor, x: Tensor) -> Tensor:
    return torch.stack([g.norm() for g in torch.autograd.grad(loss, [x], create_graph=True)]).square().sum()


@pytest.mark.parametrize(
    ("penalty", "code"),
    [
        (one_of_a_tuple, "slope = slope * inv_scale"),
        (unpacked, "slope = slope * inv_scale"),
        (within_an_expression, "(torch.autograd.grad(...)[0] * inv_scale) in place of torch.autograd.grad(...)[0]"),
        (iterated, "[g * inv_scale for g in torch.autograd.grad(...)] in place of torch.autograd.grad(...)"),
    ],
)
def test_a_fix_that_fits_the_statement(penalty: Callable[[Tensor, Tensor], Tensor], code: str, guard: Guard) -> None:
    def script() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Softplus(), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=64.0)
        for _ in range(3):
            x = torch.randn(16, 6, requires_grad=True)
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(x)
            loss = out.float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss + 0.01 * penalty(scaler.scale(loss), x)).backward()
            scaler.step(optimizer)
            scaler.update()

    run = guard(script)
    assert run.faults == 0, run.stderr
    (incident,) = [i for i in run.report.incidents if i.severity != "info"]
    assert (incident.cause, incident.evidence["in_loss"]) == ("clip-before-unscale", True)
    assert incident.fixes[0].how.endswith(f"inv_scale = 1.0 / scaler.get_scale(); {code}")


@pytest.mark.parametrize("penalty", [of_list, of_norm, of_squares, of_inner_step, of_direction, of_foreach])
def test_a_penalty_that_takes_the_scale_out(guard: Guard, penalty: Penalty) -> None:
    run = guard(body(penalty))
    assert run.faults == 0
    assert run.causes == []


def test_a_scale_of_one_is_none(guard: Guard) -> None:
    assert guard(body(of_scaled, scale=1.0)).causes == []


def test_the_run_is_that_without_a_guard(guard: Guard) -> None:
    def script() -> list[Tensor]:
        torch.manual_seed(0)
        model, scaler = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(3):
            loss = model(torch.randn(4, 3)).square().mean()
            gradients = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
            scaler.scale(loss + 1e-9 * norm(gradients)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    plain = script()
    run = guard(script)
    assert "clip-before-unscale" in run.causes
    assert all(torch.equal(a, b) for a, b in zip(plain, run.result, strict=True))
