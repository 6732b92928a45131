"""A library's call puts a module of its own around the script's, as ODE solvers do: modules are named from the script's."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable

import torch
from torch import Tensor, nn
from watching import Watched

Guard = Callable[..., Watched]
BAD = 2
SOLVER = """
from torch import nn

class Perturbed(nn.Module):
    def __init__(self, base_func):
        super().__init__()
        self.base_func = base_func

    def forward(self, t, y):
        return self.base_func(t, y)

def solve(func, y, steps):
    func = Perturbed(Perturbed(func))
    for step in range(steps):
        y = y + 0.1 * func(step * 0.1, y)
    return y
"""


def solver() -> Callable[[nn.Module, Tensor, int], Tensor]:
    names: dict[str, object] = {"__name__": "solver"}
    exec(compile(SOLVER, os.path.join(sysconfig.get_path("purelib"), "solver", "fixed.py"), "exec"), names)
    solve = names["solve"]
    assert callable(solve)
    return solve


class Cubic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, t: float, y: Tensor) -> Tensor:
        return 0.6 * y**3 + self.inner(y)


def train(is_part: bool, is_bad: bool = True) -> None:
    torch.manual_seed(0)
    solve = solver()
    model = nn.ModuleDict({"dynamics": Cubic(), "head": nn.Linear(3, 1)}) if is_part else Cubic()
    dynamics = model["dynamics"] if isinstance(model, nn.ModuleDict) else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for step in range(4):
        y = solve(dynamics, torch.randn(4, 3) * (3e4 if step == BAD and is_bad else 0.1), 6)
        loss = (model["head"](y) if isinstance(model, nn.ModuleDict) else y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_the_script_holds_it(guard: Guard) -> None:
    run = guard(lambda: train(is_part=False))
    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.step, incident.cause, incident.module) == (BAD, "overflow", "")


def test_it_hangs_in_the_scripts_model(guard: Guard) -> None:
    run = guard(lambda: train(is_part=True))
    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.step, incident.cause, incident.module) == (BAD, "overflow", "dynamics")


def test_nothing_bad(guard: Guard) -> None:
    run = guard(lambda: train(is_part=False, is_bad=False))
    assert run.faults == 0, run.stderr
    assert not run.report.incidents
