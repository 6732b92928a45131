"""Bad numbers that came in from NumPy or from a list: where the script made them, and a repair that repairs infinities."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

Guard = Callable[..., Any]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))


def train(wrap: Callable[[Any], torch.Tensor]) -> None:
    """REINFORCE with rewards that are all equal in step 2."""
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        rewards = np.zeros(6) if step == 2 else np.arange(6.0)
        with np.errstate(all="ignore"):
            gain = (rewards - rewards.mean()) / rewards.std()  # <- made here
        log_p = nn.functional.logsigmoid(model(torch.ones(6, 4))).squeeze(1)
        loss = -(log_p * wrap(gain)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()


@pytest.mark.parametrize(
    "wrap",
    [torch.from_numpy, lambda a: torch.tensor(a, dtype=torch.float32), lambda a: torch.as_tensor(a).float()],
    ids=["same memory", "copied", "rounded"],
)
def test_the_line_of_numpy(wrap: Callable[[Any], torch.Tensor], guard: Guard) -> None:
    incident = guard(lambda: train(wrap)).report.incidents[0]
    assert (incident.cause, incident.step) == ("nonfinite-input", 2)
    code = inspect.getsource(train).splitlines()
    number = inspect.getsourcelines(train)[1] + next(i for i, line in enumerate(code) if "made here" in line)
    said = incident.evidence["made_outside"]
    assert (said["name"], said["kind"], said["line"]) == ("gain", "NumPy array", number)
    assert f"test_made_outside.py:{number}" in incident.explanation
    assert f"test_made_outside.py:{number}" in incident.fixes[0].how


def test_a_list(guard: Guard) -> None:
    def body() -> None:
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        wanted = [0.5, float("nan"), 1.5]
        nn.functional.mse_loss(model(torch.ones(3, 4)).squeeze(1), torch.tensor(wanted)).backward()
        opt.step()

    incident = guard(body).report.incidents[0]
    assert incident.cause == "nonfinite-input"
    assert incident.evidence["made_outside"]["name"] == "wanted"


def test_data_that_nobody_holds(guard: Guard) -> None:
    def body() -> None:
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        target = torch.tensor([0.5, float("nan"), 1.5])
        nn.functional.mse_loss(model(torch.ones(3, 4)).squeeze(1), target).backward()
        opt.step()

    incident = guard(body).report.incidents[0]
    assert incident.cause == "nonfinite-input"
    assert "made_outside" not in incident.evidence


@pytest.mark.parametrize("bad", [float("-inf"), float("inf"), float("nan")])
def test_the_repair_cures_what_it_was_tried_on(bad: float, guard: Guard) -> None:
    """`torch.nan_to_num` alone puts the largest number in the place of an infinity, and a LayerNorm makes NaN of that."""

    data = torch.randn(3, 6, 4)
    data[1, 2, 1] = bad

    def body(clean: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 1))
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(3):
            x = data[step]
            opt.zero_grad()
            model(clean(x)).square().mean().backward()
            opt.step()
        return all(bool(p.isfinite().all()) for p in model.parameters())

    incident = guard(lambda: body(lambda x: x)).report.incidents[0]
    assert incident.cause == "nonfinite-input"
    (fix,) = [f for f in incident.fixes if f.action == "fix-data"]
    assert fix.verified
    extra = {name: 0.0 for name in ("posinf", "neginf") if f"{name}=0.0" in fix.how}
    assert extra == ({} if bad != bad else {"posinf" if bad > 0 else "neginf": 0.0})
    assert body(lambda x: torch.nan_to_num(x, **extra))
