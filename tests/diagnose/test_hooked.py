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
