"""Gradients that clipping has found finite are not looked at again; all others are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import Watched, fingerprint

from ampguard.capture import gradients

STEPS, BAD = 12, 9

Between = Callable[[int, list[Tensor]], None]


class Loop:
    """Trains without a scaler and clips; `between` is called after the clipping, `spoil` hides a NaN in a gradient."""

    def __init__(self, between: Between | None = None, spoil: bool = False, **clipping: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizers = [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.model[0], self.model[2])]
        self.between, self.spoil = between, spoil
        self.clipping = {"max_norm": 1.0, **clipping}

    def __call__(self) -> dict[str, Any]:
        for number in range(STEPS):
            x = torch.randn(6, 4)
            out = self.model(x)
            loss = out.pow(2).mean()
            if self.spoil and number == BAD:
                loss = loss + (out * 0).abs().sqrt().sum()  # finite, with an infinite derivative times zero
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss.backward()
            for part in (self.model[0], self.model[2]):
                nn.utils.clip_grad_norm_(part.parameters(), **self.clipping)
            if self.between is not None:
                self.between(number, [p.grad for p in self.model.parameters() if p.grad is not None])
            for optimizer in self.optimizers:
                optimizer.step()
        return fingerprint(self.model, *self.optimizers)


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many gradients were looked at, each time."""
    counts: list[int] = []
    original = gradients.all_finite_on_cpu

    def counting(values: Any) -> bool:
        values = list(values)
        counts.append(len(values))
        return original(values)

    monkeypatch.setattr(gradients, "all_finite_on_cpu", counting)
    return counts


@pytest.mark.parametrize("clipping", [{}, {"norm_type": float("inf")}, {"max_norm": float("inf")}, {"foreach": False}])
def test_finite_norms_save_the_look(
    clipping: dict[str, Any], guard: Callable[..., Watched], looked_at: list[int]
) -> None:
    run = guard(Loop(**clipping))
    assert run.result == Loop(**clipping)()
    assert run.causes == []
    assert sum(looked_at) == 0


def test_bad_gradients_are_found_behind_a_clip(guard: Callable[..., Watched]) -> None:
    run = guard(Loop(spoil=True))
    assert [(i.cause, i.step) for i in run.report.incidents[:1]] == [("singular-gradient", BAD)]


@pytest.mark.parametrize("clipping", [{"max_norm": float("nan")}, {"norm_type": 0.0}])
def test_a_norm_that_proves_nothing(
    clipping: dict[str, Any], guard: Callable[..., Watched], looked_at: list[int]
) -> None:
    guard(Loop(**clipping))
    assert sum(looked_at) > 0


def test_gradients_written_to_after_the_clip_are_looked_at(guard: Callable[..., Watched], looked_at: list[int]) -> None:
    def spoil(number: int, grads: list[Tensor]) -> None:
        if number == BAD:
            grads[1].fill_(float("nan"))

    run = guard(Loop(between=spoil))
    assert looked_at[0] == 1
    assert "something changed them between backward and the optimizer's step" in run.first.explanation


def test_gradients_put_in_place_of_others_are_looked_at(guard: Callable[..., Watched], looked_at: list[int]) -> None:
    loop = Loop()

    def replace(number: int, grads: list[Tensor]) -> None:
        if number == BAD:
            loop.model[2].weight.grad = torch.full_like(loop.model[2].weight, float("inf"))

    loop.between = replace
    run = guard(loop)
    assert looked_at[0] == 1
    assert run.report.incidents[0].step == BAD
