"""What follows from a broken protocol is told there; what has nothing to do with it stays an incident of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import SGD, Adam, Optimizer

Guard = Callable[..., Any]


class Parts:
    def __init__(self, kind: type[Optimizer], rate: float, scale: float) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
        self.optimizer: Any = kind(self.model.parameters(), lr=rate)  # type: ignore[call-arg]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)

    def loss(self, x: Tensor | None = None) -> Tensor:
        x = torch.randn(32, 6) if x is None else x
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.model(x)
        return F.mse_loss(out.float(), x[:, :1] * 2)

    def step(self, past_the_scaler: bool, x: Tensor | None = None) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(x)).backward()
        if past_the_scaler:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def steps(parts: Parts, past: range, count: int = 30, spoilt: int = -1) -> None:
    for i in range(count):
        x = torch.randn(32, 6)
        if i == spoilt:
            x[2, 3] = float("inf")
        parts.step(i in past, x)


def test_weights_that_it_throws_away(guard: Guard) -> None:
    run = guard(lambda: steps(Parts(SGD, 0.02, 4096.0), range(20, 21)))
    assert run.causes == ["bypassed-scaler"]
    assert (run.first.step, run.first.occurrences) == (20, 1)
    assert run.first.evidence["later_failures_caused_by_it"] >= 5
    assert "in step 21" in run.first.evidence["led_to"][0]
    assert "Failures that follow from it: " in run.first.explanation


def test_an_overflow_that_the_scaler_would_have_skipped(guard: Guard) -> None:
    """The scale alone makes it; the update past the scaler makes the weights NaN."""
    run = guard(lambda: steps(Parts(Adam, 1e-3, 2.0**22), range(30)))
    assert run.causes == ["bypassed-scaler"]
    assert run.first.evidence["led_to"] == ["loss-scale-overflow in step 0"]
    assert run.stderr.count("error[") == 1


def test_an_overflow_in_a_later_step_past_the_scaler(guard: Guard) -> None:
    def body() -> None:
        parts = Parts(Adam, 1e-3, 1024.0)
        steps(parts, range(10), 10)
        parts.scaler.update(2.0**22)
        steps(parts, range(10), 10)

    run = guard(body)
    assert run.causes == ["bypassed-scaler"]
    assert run.first.evidence["led_to"] == ["loss-scale-overflow in step 10"]


def test_a_window_whose_gradients_are_not_all_unscaled(guard: Guard) -> None:
    def body() -> None:
        parts = Parts(SGD, 0.02, 4096.0)
        for _ in range(20):
            parts.optimizer.zero_grad()
            parts.scaler.scale(parts.loss()).backward()
            parts.scaler.unscale_(parts.optimizer)
            parts.scaler.scale(parts.loss()).backward()
            parts.scaler.step(parts.optimizer)
            parts.scaler.update()

    run = guard(body)
    assert run.causes == ["accumulation-broken"]
    assert run.first.evidence["later_failures_caused_by_it"] >= 5


@pytest.mark.parametrize("past", [range(20, 21), range(30)])
def test_what_is_in_the_data_is_an_incident_of_its_own(past: range, guard: Guard) -> None:
    """Adam bears gradients that are too large; the batch has nothing to do with them."""
    run = guard(lambda: steps(Parts(Adam, 1e-3, 256.0), past, spoilt=25))
    assert sorted(run.causes) == ["bypassed-scaler", "nonfinite-input"]


def test_a_rate_that_is_too_high_for_adam(guard: Guard) -> None:
    """The weights grow by what the rate allows, with the scale or without it."""

    def body() -> None:
        parts = Parts(Adam, 30.0, 8.0)
        steps(parts, range(40), 40)

    run = guard(body)
    assert run.causes[0] == "bypassed-scaler"
    assert "led_to" not in run.first.evidence
    assert len(run.causes) == 2


def test_a_single_step_past_the_scaler_far_from_a_close_look(guard: Guard) -> None:
    run = guard(lambda: steps(Parts(Adam, 1e-3, 256.0), range(21, 22)))
    assert (run.causes, run.first.step) == (["bypassed-scaler"], 21)


def test_a_division_of_the_data_of_the_gradients(guard: Guard) -> None:
    """`p.grad.data` has a version counter of its own."""

    def body() -> None:
        parts = Parts(Adam, 1e-3, 1024.0)
        for _ in range(12):
            parts.optimizer.zero_grad()
            parts.scaler.scale(parts.loss()).backward()
            for p in parts.model.parameters():
                p.grad.data.div_(parts.scaler.get_scale())  # type: ignore[union-attr]
            parts.optimizer.step()

    assert guard(body).causes == []
