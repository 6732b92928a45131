"""Modules without values, lazy ones or on the meta device, and frozen ScriptModules, which have no `training`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from watching import Watched, fingerprint, seed_everything

Guard = Callable[..., Watched]

pytestmark = [
    pytest.mark.filterwarnings("ignore:Lazy modules are a new feature"),
    pytest.mark.filterwarnings("ignore:`torch.jit.*deprecated"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),
]


def lazy() -> nn.Sequential:
    return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(1))


def train(model: nn.Module, bad: int = -1, target: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        x = torch.randn(4, 5)
        given = target(x) if target is not None else torch.zeros(())
        loss = torch.log((model(x) - given).square() * (0 if step == bad else 1) + (-1 if step == bad else 1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("first_call", ["in the training", "before it", "in an evaluation", "after loading"])
def test_lazy_modules(guard: Guard, first_call: str) -> None:
    def body() -> object:
        seed_everything()
        model = lazy()
        if first_call == "after loading":
            model.load_state_dict(lazy().state_dict())
        if first_call == "before it":
            model(torch.randn(4, 5))
        if first_call == "in an evaluation":
            with torch.no_grad():
                model.eval()(torch.randn(4, 5))
            model.train()
        train(model)
        return fingerprint(model)

    plain = body()
    run = guard(body)
    assert (run.result, run.faults, run.causes, run.report.steps) == (plain, 0, [], 5)


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_a_failure_of_a_lazy_module(guard: Guard, bad: int) -> None:
    run = guard(lambda: train(lazy(), bad))
    assert (run.faults, run.first.cause, run.first.step) == (0, "domain-error", bad)
    assert any(fix.verified for fix in run.first.fixes)


def frozen() -> torch.jit.ScriptModule:
    return torch.jit.freeze(torch.jit.script(nn.Sequential(nn.Linear(5, 1), nn.ReLU()).eval()))


@pytest.mark.parametrize("bad", [-1, 3])
def test_a_frozen_teacher(guard: Guard, bad: int) -> None:
    def body() -> object:
        seed_everything()
        model, teacher = nn.Linear(5, 1), frozen()
        train(model, bad, teacher)
        return fingerprint(model)

    plain = body()
    run = guard(body)
    assert (run.faults, run.report.steps) == (0, 5)
    assert str(run.result) == str(plain)
    assert run.causes == ([] if bad < 0 else ["domain-error"])


def test_a_model_on_the_meta_device(guard: Guard) -> None:
    def body() -> object:
        seed_everything()
        with torch.device("meta"):
            shapes = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
            shapes(torch.randn(4, 5))
        model = nn.Linear(5, 1)
        train(model)
        return fingerprint(model)

    plain = body()
    run = guard(body)
    assert (run.result, run.faults, run.causes) == (plain, 0, [])
