"""Steps of many small operators outside modules: a filter, a recursion, a decoder written as a loop over time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from watching import Watched, seed_everything

from ampguard.capture.glue import schedule

Guard = Callable[..., Watched]


@pytest.mark.parametrize("is_by_input", [True, False])
def test_why_it_is_unexplained(is_by_input: bool, guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "GLUE_TIME_SHARE", 0.0)  # however slow the machine is, the step is a quick one
    monkeypatch.setattr(schedule, "FREE_SECONDS", 0.0)

    def body() -> None:
        seed_everything()
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(10):  # (the last is none of those that are taped whole in their turn)
            x = torch.randn(4, 3)
            x = x / (0 * x if is_by_input and step == 9 else x.std(0))
            out = model(x)
            state = torch.zeros(4, 3)
            for _ in range(100):
                state = 0.9 * state + 0.1 * out
            loss = (state if is_by_input or step < 9 else state / (0 * state)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    first = guard(body).first
    assert (first.cause, first.step) == ("unexplained", 9)
    assert "more operators outside modules than are recorded" in first.explanation
    assert first.evidence.get("inputs_are_finite") is not is_by_input


@pytest.mark.slow
def test_a_short_run_is_recorded_whole(guard: Guard) -> None:
    def body() -> None:
        seed_everything()
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(9):
            out = model(torch.randn(4, 3))
            state = torch.zeros(4, 3)
            for time in range(400):
                gain = state.detach().square().mean() + (0.5 if (step, time) != (8, 390) else -1e4)
                state = 0.9 * state + 0.1 * out * gain.sqrt()
            optimizer.zero_grad()
            state.square().mean().backward()
            optimizer.step()

    first = guard(body).first
    assert (first.cause, first.step, first.op) == ("domain-error", 8, "aten.sqrt.default")
    assert first.location is not None
    assert "gain.sqrt()" in first.location.code


def test_a_long_run_is_recorded_whole_only_now_and_then() -> None:
    plan, limits, seconds = schedule.TapeSchedule(), [], 0.005
    for step in range(4000):
        limits.append(plan.limit)
        taped = min(1000, plan.limit)
        plan.ended(step, seconds, seconds, True, taped)
    extra = sum(max(0, min(1000, limit) - schedule.FREE_GLUE_OPS) for limit in limits) * schedule.TAPED_CALL_SECONDS
    assert all(limit > 1000 for limit in limits[:150]), "a short run, every step"
    assert extra < 1.05 * (schedule.FREE_SECONDS + schedule.GLUE_TIME_SHARE * 4000 * seconds)
    assert any(limit > 1000 for limit in limits[2000:])
