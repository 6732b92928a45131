"""What a closure does to gradients behind its backward pass belongs to the step (Lightning calls all its hooks there)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import Watched, fingerprint, seed_everything

Guard = Callable[..., Watched]
STEPS, BAD = 9, 6


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.other = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor, weight: float) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        loss: Tensor = self.one(hidden).square().mean() + weight * self.other(hidden).square().mean()
        return loss


def normalised(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        assert p.grad is not None
        p.grad.div_(p.grad.norm())


def repaired(parameters: list[nn.Parameter]) -> None:
    normalised(parameters)
    for p in parameters:
        assert p.grad is not None
        p.grad.nan_to_num_()


class Closure:
    """No function: an optimizer may want more of it than to be called."""

    def __init__(self, call: Callable[[], Tensor]) -> None:
        self.call = call

    def __call__(self) -> Tensor:
        return self.call()


def trained(
    change: Callable[[list[nn.Parameter]], None],
    bad: int | None,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    wrap: Callable[[Any], Any] = functools.partial,
) -> dict[str, Any]:
    seed_everything()
    model = TwoHeads()
    parameters = list(model.parameters())
    optimizer = make(parameters, lr=0.01)
    for step in range(STEPS):
        x = torch.randn(5, 6)

        def closure(x: Tensor = x, weight: float = 0.0 if step == bad else 1.0) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x, weight)
            loss.backward()  # type: ignore[no-untyped-call]
            change(parameters)
            return loss

        optimizer.step(wrap(closure))
    return fingerprint(model, optimizer)


@pytest.mark.parametrize("wrap", [functools.partial, lambda closure: closure], ids=["partial", "function"])
def test_a_division_there_is_told_with_its_line(guard: Guard, wrap: Callable[[Any], Any]) -> None:
    plain = trained(normalised, BAD, wrap=wrap)
    run = guard(lambda: trained(normalised, BAD, wrap=wrap))
    assert run.faults == 0, run.stderr
    assert run.result == plain
    assert run.causes == ["division-by-zero"]
    assert run.first.step == BAD
    assert run.first.location is not None
    assert run.first.location.code == "p.grad.div_(p.grad.norm())"
    assert run.first.fixes[0].verified


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.LBFGS])
def test_what_the_closure_repairs_is_none(guard: Guard, make: Callable[..., torch.optim.Optimizer]) -> None:
    plain = trained(repaired, BAD, make)
    run = guard(lambda: trained(repaired, BAD, make))
    assert run.faults == 0, run.stderr
    assert run.result == plain
    assert not [incident for incident in run.report.incidents if incident.severity == "error"]


def test_an_object_that_is_called_is_handed_on_as_it_is(guard: Guard) -> None:
    given: list[Any] = []

    class Asking(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            given.append(closure)
            return super().step(closure)

    run = guard(lambda: trained(repaired, None, Asking, wrap=Closure))
    assert run.faults == 0, run.stderr
    assert all(type(closure) is Closure for closure in given)
