"""A scaler remembers by object what it has unscaled: an optimizer and what a script wraps around it are two to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]


class Warmup:
    """A schedule around an optimizer, as tutorials write it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.count = 0

    @property
    def param_groups(self) -> Any:
        return self._optimizer.param_groups

    def step(self) -> None:
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 1e-3 * min(1.0, self.count / 5)
        self._optimizer.step()


def trained(unscaled: str | None, stepped: str) -> Callable[[], None]:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        adam = torch.optim.Adam(model.parameters())
        named = {"adam": adam, "schedule": Warmup(adam)}
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=256.0)
        for _ in range(5):
            adam.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(torch.randn(16, 4))
            scaler.scale(out.float().square().mean()).backward()
            if unscaled is not None:
                scaler.unscale_(named[unscaled])
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(named[stepped])
            scaler.update()

    return body


@pytest.mark.parametrize(("unscaled", "stepped"), [("adam", "schedule"), ("schedule", "adam")])
def test_unscaled_inside_and_stepped_outside(unscaled: str, stepped: str, guard: Guard) -> None:
    run = guard(trained(unscaled, stepped))

    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step, incident.occurrences) == ("double-unscale", 0, 5)
    assert incident.location.code == "scaler.step(named[stepped])"
    assert incident.evidence["first"]["code"] == "scaler.unscale_(named[unscaled])"
    assert "256 times too small" in incident.explanation
    name = "adam" if stepped == "adam" else "named['schedule']"
    assert f"scaler.unscale_({name})" in incident.fixes[0].how


@pytest.mark.parametrize("unscaled", ["adam", "schedule", None])
def test_one_and_the_same_object_is_silent(unscaled: str | None, guard: Guard) -> None:
    run = guard(trained(unscaled, unscaled or "schedule"))
    assert (run.faults, run.report.incidents) == (0, ())
