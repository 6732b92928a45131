"""Gradients that a hook on a parameter makes bad after they were added up."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from watching import Watched

BAD = 3


def unit(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.div_(parameter.grad.norm())


def bounded(limit: float, parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(limit / parameter.grad.norm())


class Direction:
    def __call__(self, parameter: Tensor) -> None:
        unit(parameter)

    def once(self, parameter: Tensor) -> None:
        unit(parameter)


def train(hook: Callable[[Tensor], None]) -> None:
    main, aux = nn.Linear(4, 2), nn.Linear(4, 3)
    optimizer = torch.optim.SGD([*main.parameters(), *aux.parameters()], lr=0.1)
    for parameter in aux.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    for step in range(BAD + 3):
        x = torch.randn(5, 4)
        loss = main(x).pow(2).mean() + aux(x).pow(2).mean() * float(step != BAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


HOOKS = {
    "function": (unit, "unit"),
    "partial": (functools.partial(bounded, 1.0), "bounded"),
    "method": (Direction().once, "Direction.once"),
    "object": (Direction(), "Direction.__call__"),
}


@pytest.mark.parametrize(("hook", "name"), HOOKS.values(), ids=HOOKS)
def test_the_hook_is_named(hook: Callable[[Tensor], None], name: str, guard: Callable[..., Watched]) -> None:
    run = guard(lambda: train(hook))
    (incident,) = run.report.incidents
    assert (incident.step, incident.phase, incident.cause) == (BAD, "backward", "unexplained")
    assert incident.location is not None
    known = name if sys.version_info >= (3, 11) else name.rsplit(".", 1)[-1]
    assert incident.location.full_name == incident.evidence["hook"] == known
    assert incident.evidence["parameters"] == {"nonfinite": ["aux.weight", "aux.bias"]}
    assert not run.faults


def test_hook_on_other_parameters(guard: Callable[..., Watched]) -> None:
    """What changed the gradients ran elsewhere: the hook is not to blame."""

    def body() -> None:
        main, aux = nn.Linear(4, 2), nn.Linear(4, 3)
        optimizer = torch.optim.SGD([*main.parameters(), *aux.parameters()], lr=0.1)
        aux.weight.register_post_accumulate_grad_hook(unit)
        for step in range(BAD + 2):
            x = torch.randn(5, 4)
            optimizer.zero_grad()
            (main(x).pow(2).mean() + aux(x).pow(2).mean()).backward()
            if step == BAD:
                assert main.weight.grad is not None
                main.weight.grad.mul_(torch.tensor(float("inf")))
            optimizer.step()

    first = guard(body).first
    assert "hook" not in first.evidence


class EqualGradients(nn.Module):
    """Makes the gradients of its input one size."""

    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(self.rescaled)
        return x

    def rescaled(self, gradient: Tensor) -> Tensor:
        return gradient / gradient.abs().amax(dim=-1, keepdim=True)


def test_a_hook_on_what_a_call_is_given_is_outside_every_module(guard: Callable[..., Watched]) -> None:
    """It runs where no operator of the call is differentiated, and the words say what the report says."""

    def body() -> None:
        torch.manual_seed(0)
        encoder = nn.Linear(10, 16)
        branch = nn.Sequential(EqualGradients(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
        optimizer = torch.optim.SGD([*encoder.parameters(), *branch.parameters()], lr=1e-3)
        for step in range(6):
            error = branch(encoder(torch.randn(16, 10))) - torch.randn(16, 1)
            weights = torch.ones(16, 1)
            if step == 4:
                weights[3] = 0.0
            optimizer.zero_grad()
            (weights * error.square()).mean().backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0
    assert (run.first.cause, run.first.step, run.first.module) == ("singular-gradient", 4, None)
    assert run.first.location.code.startswith("return gradient / gradient.abs()")
    assert "outside every module" in run.first.explanation
