"""Weights that a script moves along scaled gradients and puts back, or by an optimizer of its own with a trust ratio."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
SCALE = 512.0
Nudge = Callable[[Tensor, Tensor, Any], None]


def adversarial(nudge: Nudge) -> Callable[[], None]:
    """Two backward passes and one step: at the weights, and at those moved along the gradient."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
        opt = torch.optim.Adam(net.parameters(), lr=1e-3)
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=SCALE)

        def loss_of(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.float16):
                return nn.functional.cross_entropy(net(x).float(), (x[:, 0] > 0).long())

        for _ in range(5):
            x = torch.randn(16, 6)
            opt.zero_grad()
            scaler.scale(loss_of(x)).backward()
            backup = net[0].weight.data.clone()
            nudge(net[0].weight, net[0].weight.grad, scaler)
            scaler.scale(loss_of(x)).backward()
            net[0].weight.data = backup
            scaler.step(opt)
            scaler.update()

    return body


def by_a_multiple(weight: Tensor, gradient: Tensor, scaler: Any) -> None:
    weight.data.add_(0.25 * gradient)  # nudge


def by_a_length(weight: Tensor, gradient: Tensor, scaler: Any) -> None:
    weight.data.add_(0.25 * gradient / gradient.norm())


def by_signs(weight: Tensor, gradient: Tensor, scaler: Any) -> None:
    weight.data.add_(0.25 * gradient.sign())


def by_true_ones(weight: Tensor, gradient: Tensor, scaler: Any) -> None:
    weight.data.add_(0.25 * gradient / scaler.get_scale())


def test_an_attack_along_scaled_gradients(guard: Guard) -> None:
    run = guard(adversarial(by_a_multiple))
    assert (run.faults, run.causes) == (0, ["bypassed-scaler"])
    assert (run.first.step, run.first.evidence["factor"], run.first.module) == (0, SCALE, "0")
    assert run.first.location.code.endswith("# nudge")


@pytest.mark.parametrize("nudge", [by_a_length, by_signs, by_true_ones])
def test_an_attack_of_some_length(nudge: Nudge, guard: Guard) -> None:
    run = guard(adversarial(nudge))
    assert (run.faults, run.causes) == (0, [])


def perturbing(change: Callable[[Tensor, Any], None]) -> Callable[[], None]:
    """The input is moved along its gradient, and what it does there is learnt."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(6, 4)
        opt = torch.optim.SGD(net.parameters(), lr=1e-2)
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=SCALE)
        for _ in range(5):
            x = torch.randn(16, 6)
            delta = torch.zeros_like(x, requires_grad=True)
            for turn in range(2):
                with torch.autocast("cpu", dtype=torch.float16):
                    out = net(x + delta)
                opt.zero_grad()
                scaler.scale(nn.functional.cross_entropy(out.float(), (x[:, 0] > 0).long())).backward()
                if turn == 0:
                    with torch.no_grad():
                        change(delta, scaler)
            scaler.step(opt)
            scaler.update()

    return body


def test_an_input_that_is_moved_along_a_scaled_gradient(guard: Guard) -> None:
    run = guard(perturbing(lambda delta, scaler: delta.add_(0.5 * delta.grad)))
    assert (run.faults, run.causes) == (0, ["bypassed-scaler"])
    assert (run.first.step, run.first.evidence["factor"]) == (0, SCALE)
    assert "`delta`" in run.first.explanation


@pytest.mark.parametrize(
    "change",
    [
        lambda delta, scaler: delta.add_(0.5 * delta.grad.sign()),
        lambda delta, scaler: delta.add_(0.5 * delta.grad / delta.grad.norm()),
        lambda delta, scaler: delta.add_(0.5 * delta.grad / scaler.get_scale()),
    ],
)
def test_an_input_that_is_moved_by_some_length(change: Any, guard: Guard) -> None:
    run = guard(perturbing(change))
    assert (run.faults, run.causes) == (0, [])


def looking_ahead(by: float) -> Callable[[], None]:
    """A step ahead along `torch.autograd.grad`, the gradients there, and back."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(6, 2)
        opt = torch.optim.SGD(net.parameters(), lr=1e-2)
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=SCALE)
        held = list(net.parameters())
        for _ in range(5):
            x = torch.randn(16, 6)
            first = torch.autograd.grad(scaler.scale(net(x).pow(2).mean()), held)
            backup = [p.detach().clone() for p in held]
            with torch.no_grad():
                for p, g in zip(held, first, strict=True):
                    p.sub_(by * g)  # ahead
            then = torch.autograd.grad(scaler.scale(net(x).pow(2).mean()), held)
            with torch.no_grad():
                for p, kept, g in zip(held, backup, then, strict=True):
                    p.copy_(kept)
                    p.grad = g
            scaler.step(opt)
            scaler.update()

    return body


def test_a_look_ahead_along_scaled_gradients(guard: Guard) -> None:
    run = guard(looking_ahead(0.01))
    assert run.faults == 0
    assert "bypassed-scaler" in run.causes


def test_a_look_ahead_by_a_rate_over_the_scale(guard: Guard) -> None:
    run = guard(looking_ahead(0.01 / SCALE))
    assert (run.faults, [c for c in run.causes if c == "bypassed-scaler"]) == (0, [])


class Lars:
    """No optimizer of PyTorch's. `trusts`: also what has one dimension."""

    def __init__(self, parameters: Any, lr: float, trusts: bool = False) -> None:
        self.parameters, self.lr, self.trusts = list(parameters), lr, trusts

    @torch.no_grad()
    def step(self) -> None:
        for p in self.parameters:
            gradient = p.grad
            if p.ndim > 1 or self.trusts:
                gradient = gradient * (0.001 * (p.norm() + 0.1) / (gradient.norm() + 1e-9))
            p.sub_(self.lr * gradient)  # update
            p.grad = None


@pytest.mark.parametrize("trusts", [False, True])
def test_an_own_optimizer_whose_biases_have_no_trust_ratio(trusts: bool, guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
        opt = Lars(net.parameters(), 0.2, trusts)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        for _ in range(5):
            x = torch.randn(16, 6)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.cross_entropy(net(x).float(), (x[:, 0] > 0).long())
            scaler.scale(loss).backward()
            opt.step()

    run = guard(body)
    assert (run.faults, run.causes) == (0, [] if trusts else ["bypassed-scaler"])
    if not trusts:
        assert run.first.step == 0
        assert run.first.location.code.endswith("# update")
