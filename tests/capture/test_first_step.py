"""What a script computes before its first module is its own doing in the first step too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import fingerprint, seed_everything

Guard = Callable[..., Any]


def noised(x: Tensor, kept: float) -> Tensor:
    return (torch.ones(()) * kept).sqrt() * x


def train(kept: float, prepare: Callable[[nn.Module], Any] | None = None) -> dict[str, Any]:
    seed_everything()
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    if prepare is not None:
        prepare(model)
    for _ in range(3):
        x = torch.randn(6, 4)
        loss = (model(noised(x, kept)) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not loss.isfinite():
            break
    return fingerprint(model, optimizer)


@pytest.mark.parametrize("prepare", [None, copy.deepcopy, nn.Module.state_dict])
def test_the_first_batch_is_spoilt_by_the_script(guard: Guard, prepare: Callable[[nn.Module], Any] | None) -> None:
    unguarded = train(-0.5, prepare)
    run = guard(lambda: train(-0.5, prepare))
    assert run.faults == 0, run.stderr
    assert run.result == unguarded
    assert (run.first.cause, run.first.step, run.first.op) == ("domain-error", 0, "aten.sqrt.default")
    assert run.first.location is not None
    assert run.first.location.code == "return (torch.ones(()) * kept).sqrt() * x"


def initialise(model: nn.Module) -> None:
    for _ in range(20):
        for p in model.parameters():
            nn.init.normal_(p, std=0.02)


def test_a_long_setting_up_is_forgotten(guard: Guard) -> None:
    unguarded = train(0.5, initialise)
    run = guard(lambda: train(0.5, initialise))
    assert run.faults == 0, run.stderr
    assert run.result == unguarded
    assert run.report.incidents == ()


PACKAGE = """
import torch

class Adam(torch.optim.Adam):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
"""


def test_optimizer_of_a_packages_own_class_is_made_by_the_script(guard: Guard) -> None:
    package: dict[str, Any] = {"__name__": "strangers_package"}
    exec(compile(PACKAGE, str(Path(torch.__file__).parents[1] / "strangers_package.py"), "exec"), package)

    def body() -> None:
        points = nn.Parameter(torch.eye(3)[[0, 1, 0, 1]])
        optimizer = package["Adam"]([points], 1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            torch.acos((points[:2] * points[2:]).sum(-1)).mean().backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.step) == ("singular-gradient", 0)


def by_hand(x: Tensor, y: Tensor, divided_by: float) -> list[float]:
    """A loop without a module and an optimizer."""
    torch.manual_seed(0)
    weight, bias = torch.randn(4, 1).requires_grad_(), torch.zeros(1).requires_grad_()
    losses = []
    for step in range(3):
        error = (x @ weight + bias - y).square().sum()
        loss = error * 0.0 / (divided_by if step == 0 else 1.0) if step == 0 else error
        torch.autograd.backward(loss)
        with torch.no_grad():
            for w in (weight, bias):
                w -= 1e-3 * w.grad
                w.grad = None
        losses.append(loss.item())
    return losses


def test_the_first_step_of_a_loop_that_has_neither_module_nor_optimizer(guard: Guard) -> None:
    x, y = torch.ones(6, 4), torch.ones(6, 1)
    run = guard(lambda: by_hand(x, y, 0.0))
    assert run.faults == 0, run.stderr
    assert str(run.result) == str(by_hand(x, y, 0.0))
    assert (run.first.cause, run.first.step, run.first.op) == ("division-by-zero", 0, "aten.div.Tensor")
    assert run.first.location is not None
    assert run.first.location.code.startswith("loss = error * 0.0 /")


def test_the_first_step_of_such_a_loop_was_given_bad_data(guard: Guard) -> None:
    x, y = torch.ones(6, 4), torch.ones(6, 1)
    x[2, 1] = float("nan")
    run = guard(lambda: by_hand(x, y, 1.0))
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.step, run.first.op) == ("nonfinite-input", 0, "aten.mm.default")
    assert [fix.verified for fix in run.first.fixes if fix.action == "fix-data"] == [True]
