"""Weights that `load_state_dict` has given bad values: its line is named, and only where nothing else has written to them."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampguard.capture.glue import schedule
from ampguard.capture.judging.carried import CarriedState

Guard = Callable[..., Any]


def made() -> tuple[nn.Sequential, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, 4)


def trained(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, steps: int = 3) -> None:
    for _ in range(steps):
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("steps", [0, 6])
def test_a_bad_checkpoint(assign: bool, steps: int, guard: Guard) -> None:
    def body() -> None:
        model, opt, x = made()
        trained(model, opt, x, steps)
        saved = copy.deepcopy(model.state_dict())
        saved["2.weight"][1, 3] = float("nan")
        model.load_state_dict(saved, assign=assign)
        if assign:
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
        trained(model, opt, x)

    incident = guard(body).report.incidents[0]
    assert (incident.cause, incident.step, incident.evidence["name"]) == ("nonfinite-parameter", steps, "2.weight")
    at = incident.evidence["loaded_at"]
    assert at["code"] == "model.load_state_dict(saved, assign=assign)"
    assert f"test_loaded_weights.py:{at['line']}" in incident.explanation
    assert [(fix.action, fix.verified) for fix in incident.fixes] == [
        ("initialise-parameter", True),
        ("load-weights", None),
    ]


@pytest.mark.parametrize("steps", [0, 6])
@pytest.mark.parametrize("long_step", [0.0, math.inf], ids=["by operators", "by calls"])
def test_an_average_that_is_none_yet(long_step: float, steps: int, guard: Guard, monkeypatch: Any) -> None:
    """Seen as it was computed, or told where it was loaded: in the evaluation that uses it."""
    monkeypatch.setattr(schedule, "LONG_STEP", long_step)
    monkeypatch.setattr(schedule, "MUCH_GLUE", math.inf)

    def body() -> None:
        model, opt, x = made()
        average, count = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}, 0
        trained(model, opt, x, steps)
        own = copy.deepcopy(model.state_dict())
        model.load_state_dict({name: value / count for name, value in average.items()})
        model.eval()
        with torch.no_grad():
            print(model(x).mean().item())
        model.load_state_dict(own)
        trained(model.train(), opt, x)

    incident = guard(body).report.incidents[0]
    assert incident.mode == "eval"
    if incident.cause == "nonfinite-parameter":
        assert incident.evidence["loaded_at"]["code"].startswith("model.load_state_dict(")
    else:
        assert incident.cause == "division-by-zero"


def test_what_was_loaded_well_and_broken_later(guard: Guard) -> None:
    def body() -> None:
        model, opt, x = made()
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        trained(model, opt, x)
        with torch.no_grad():
            model[2].weight[0, 0] = float("nan")
        trained(model, opt, x)

    incident = guard(body).report.incidents[0]
    assert incident.cause == "nonfinite-parameter"
    assert incident.evidence["loaded_at"] is None


def test_what_a_load_leaves_as_it_was(guard: Guard) -> None:
    def body() -> None:
        model, opt, x = made()
        nn.init.constant_(model[2].weight, float("nan"))
        model.load_state_dict({"0.weight": torch.ones(6, 4)}, strict=False)
        trained(model, opt, x)

    incident = guard(body).report.incidents[0]
    assert (incident.cause, incident.evidence["name"]) == ("nonfinite-parameter", "2.weight")
    assert incident.evidence["loaded_at"] is None


class Averaged:
    """An average of the weights, swapped in for evaluation; `dtype` is what it is kept in."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
        self.average = {k: v.to(dtype) for k, v in self.model.state_dict().items() if v.is_floating_point()}
        self.dtype = dtype

    def train(self) -> None:
        opt = torch.optim.SGD(self.model.parameters(), lr=0.01)
        for _ in range(6):
            opt.zero_grad()
            self.model(torch.randn(8, 3) + torch.tensor([0.0, 2e5, 0.0])).square().mean().backward()
            opt.step()
            for key, value in self.average.items():
                value.lerp_(self.model.state_dict()[key].to(self.dtype), 0.5)

    def evaluate(self, keeps_own: bool) -> None:
        own = copy.deepcopy(self.model.state_dict()) if keeps_own else {}
        self.model.load_state_dict({k: v.float() for k, v in self.average.items()}, strict=False)
        self.model.eval()
        with torch.no_grad():
            self.model(torch.randn(4, 3))
        self.model.load_state_dict(own, strict=False)


@pytest.mark.parametrize("keeps_own", [True, False])
def test_an_average_in_float16(keeps_own: bool, guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what the script keeps was not looked at (it may be too large for that)."""
    monkeypatch.setattr(CarriedState, "look", lambda *args, **kwargs: None)

    def body() -> None:
        averaged = Averaged(torch.float16)
        averaged.train()
        averaged.evaluate(keeps_own)

    gc.collect()  # else a dictionary that another of these runs has left may be found
    incident = guard(body).report.incidents[0]
    assert (incident.cause, incident.mode, incident.evidence["name"]) == (
        "nonfinite-parameter",
        "eval",
        "0.running_mean",
    )
    held = incident.evidence["held_in"]
    assert (held["key"], held["dtype"]) == ("0.running_mean", "float16")
    assert "float16 ends at 65504" in incident.explanation
    assert ("in float32 reach " in incident.explanation) is keeps_own
    first = incident.fixes[0] if keeps_own else next(f for f in incident.fixes if f.action == "force-fp32")
    assert (first.action, first.verified) == ("force-fp32", True if keeps_own else None)
    assert (held["reaches"] or 0) > 65504 or not keeps_own


def test_the_line_that_spoils_an_average_is_told(guard: Guard) -> None:
    def body() -> None:
        averaged = Averaged(torch.float16)
        averaged.train()
        averaged.evaluate(keeps_own=True)

    incident = guard(body).report.incidents[0]
    assert (incident.cause, incident.mode, incident.severity) == ("fp16-overflow", "train", "error")
    assert incident.location.code == "value.lerp_(self.model.state_dict()[key].to(self.dtype), 0.5)"


def test_an_average_in_float32(guard: Guard) -> None:
    def body() -> None:
        averaged = Averaged(torch.float32)
        averaged.train()
        averaged.evaluate(keeps_own=True)

    assert guard(body).report.status == "clean"
