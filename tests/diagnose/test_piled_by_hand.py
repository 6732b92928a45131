"""Loops that update their weights themselves: gradients that nobody clears, and those that are cleared in one way or another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import Watched, bits, seed_everything

Guard = Callable[..., Watched]
Clear = Callable[[Tensor], Any]


def sgd(weights: list[Tensor], clear: Clear, is_through_data: bool = False) -> None:
    with torch.no_grad():
        for weight in weights:
            if weight.grad is not None:
                (weight.data if is_through_data else weight).sub_(0.01 * weight.grad)
                clear(weight)


def train(clear: Clear, is_module: bool, window: int = 1, is_through_data: bool = False) -> Any:
    seed_everything()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    weights = list(model.parameters())
    if not is_module:
        weights = [p.detach().clone().requires_grad_() for p in weights]
    for step in range(8 * window):
        x = torch.randn(16, 6)
        out = model(x) if is_module else torch.tanh(x @ weights[0].T + weights[1]) @ weights[2].T + weights[3]
        (out.square().mean() / window).backward()
        if step % window == window - 1:
            sgd(weights, clear, is_through_data)
    return bits([w.detach() for w in weights])


def keep(weight: Tensor) -> None:
    """Leaves the gradient where it is."""


@pytest.mark.parametrize("is_through_data", [False, True])
@pytest.mark.parametrize("is_module", [False, True])
def test_gradients_that_are_never_cleared(is_module: bool, is_through_data: bool, guard: Guard) -> None:
    plain = train(keep, is_module, is_through_data=is_through_data)
    run = guard(lambda: train(keep, is_module, is_through_data=is_through_data))
    assert run.result == plain
    assert run.causes == ["missing-zero-grad"]
    first = run.first
    assert (first.phase, first.severity) == ("protocol", "error")
    assert first.location is not None
    assert "weight.sub_" in first.location.code or "weight.data if" in first.location.code
    assert "never clears their gradients" in first.explanation
    assert first.fixes[0].action == "call-order"


CLEARING: dict[str, Clear] = {
    "to None": lambda w: setattr(w, "grad", None),
    "in place": lambda w: w.grad.zero_() if w.grad is not None else None,
    "through data": lambda w: w.grad.data.zero_() if w.grad is not None else None,
    "to a part of it": lambda w: w.grad.mul_(0.9) if w.grad is not None else None,
}


@pytest.mark.parametrize("clear", CLEARING.values(), ids=CLEARING.keys())
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("is_module", [False, True])
def test_gradients_that_are_cleared(is_module: bool, window: int, clear: Clear, guard: Guard) -> None:
    assert guard(lambda: train(clear, is_module, window)).causes == []


def test_attacks_leave_the_gradients_of_the_model(guard: Guard) -> None:
    """Projected gradient ascent on an input: the model's weights stay as they are, whatever piles up there."""

    def attack() -> None:
        seed_everything()
        model = nn.Linear(6, 3)
        delta = torch.zeros(4, 6, requires_grad=True)
        for _ in range(8):
            nn.functional.cross_entropy(model(torch.randn(4, 6) + delta), torch.randint(0, 3, (4,))).backward()
            assert delta.grad is not None
            delta.data = (delta + 0.01 * delta.grad.sign()).clamp(-0.1, 0.1).detach()
            delta.grad.zero_()

    assert guard(attack).causes == []


def train_in_turn(clears: bool) -> Any:
    """Several models, one after the other; each clears its gradients as its turn comes."""
    seed_everything()
    members = [nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(3)]
    for _ in range(8):
        x = torch.randn(16, 6)
        for member in members:
            if clears:
                for p in member.parameters():
                    p.grad = None
            member(x).square().mean().backward()
            sgd(list(member.parameters()), keep)
    return bits([p.detach() for member in members for p in member.parameters()])


@pytest.mark.parametrize("clears", [True, False])
def test_models_that_are_trained_in_turn(clears: bool, guard: Guard) -> None:
    plain = train_in_turn(clears)
    run = guard(lambda: train_in_turn(clears))
    assert run.result == plain
    assert run.causes == ([] if clears else ["missing-zero-grad"])
