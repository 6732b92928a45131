"""Inner loops (MAML) whose fast weights hang in the module itself: as libraries put them there, and as scripts do."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from watching import Watched

Guard = Callable[..., Watched]
Learner = Callable[[nn.Module], "Adapting"]

TASKS, INNER, STEPS = 3, 4, 4


class Adapting:
    """A model for one task, whose weights are replaced by what the inner loop computes."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.fast: list[Tensor] = list(model.parameters())

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out

    def put(self, fast: list[Tensor]) -> None:
        self.fast = fast


class Functional(nn.Module):
    """A module that reads its weights from a list of its own, one entry for each inner step, as `higher` makes them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = _copied(model)
        self.history: list[list[Tensor]] = [[p.clone() for p in model.parameters()]]
        _put(self.inner, self.history[-1])

    def forward(self, x: Tensor) -> Tensor:
        _put(self.inner, self.history[-1])
        out: Tensor = self.inner(x)
        return out


class Listed(Adapting):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model = Functional(model)
        self.fast = self.model.history[-1]

    def put(self, fast: list[Tensor]) -> None:
        super().put(fast)
        self.model.history.append(fast)
        _put(self.model.inner, fast)


class Cloned(Adapting):
    """The copy's own places hold clones of the weights, and then what is computed (`learn2learn`)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model = _copied(model)
        self.put([p.clone() for p in model.parameters()])

    def put(self, fast: list[Tensor]) -> None:
        super().put(fast)
        _put(self.model, fast)


class Hung(Adapting):
    """The parameters are taken away, and plain attributes put in their place."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model = copy.deepcopy(model)
        self.put(list(model.parameters()))

    def put(self, fast: list[Tensor]) -> None:
        super().put(fast)
        for part, name, weight in zip(*_places(self.model), fast, strict=True):
            part._parameters.pop(name, None)
            setattr(part, name, weight)


def _places(model: nn.Module) -> tuple[list[nn.Module], list[str]]:
    layers = [part for part in model.modules() if isinstance(part, (nn.Linear, nn.BatchNorm1d))]
    return [layer for layer in layers for _ in "wb"], ["weight", "bias"] * len(layers)


def _copied(module: nn.Module) -> nn.Module:
    other: nn.Module = module.__new__(type(module))
    other.__dict__ = module.__dict__.copy()
    other._parameters = dict(module._parameters)
    other._buffers = {name: b.clone() if b is not None else None for name, b in module._buffers.items()}
    other._modules = {name: _copied(m) if m is not None else None for name, m in module._modules.items()}
    return other


def _put(model: nn.Module, fast: list[Tensor]) -> None:
    for part, name, weight in zip(*_places(model), fast, strict=True):
        part._parameters[name] = weight  # type: ignore[assignment]


def _moved(weights: list[Tensor], gradients: tuple[Tensor, ...], rate: float) -> list[Tensor]:
    return [p - rate * g for p, g in zip(weights, gradients, strict=True)]


def _scaled(weights: list[Tensor], gradients: tuple[Tensor, ...], rate: float) -> list[Tensor]:
    """As RMSprop moves them: the root of what is 0 for a dead unit has no derivative."""
    pairs = zip(weights, gradients, strict=True)
    return [p - rate * g / ((g * g).sqrt() + 1e-3) for p, g in pairs]


def _train(
    learner: type[Adapting], rate: float, is_first_order: bool, move: Callable[..., list[Tensor]] = _moved
) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.ReLU(), nn.Linear(8, 3))
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    alive: list[weakref.ref[Tensor]] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(TASKS):
            y = torch.arange(3).repeat(4)
            x = torch.randn(12, 4) + functional.one_hot(y, 4)
            adapting = learner(model)
            for _ in range(INNER):
                loss = functional.cross_entropy(adapting(x), y)
                gradients = torch.autograd.grad(loss, adapting.fast, create_graph=not is_first_order)
                adapting.put(move(adapting.fast, gradients, rate))
            outer = functional.cross_entropy(adapting(x), y)
            outer.backward()
            alive.append(weakref.ref(outer))
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("is_first_order", [True, False])
@pytest.mark.parametrize("learner", [Listed, Cloned, Hung])
def test_overflow_of_an_inner_loop_is_told_where_it_begins(
    learner: type[Adapting], is_first_order: bool, guard: Guard
) -> None:
    run = guard(lambda: _train(learner, 1e12, is_first_order))
    assert run.faults == 0, run.stderr
    first = run.first
    assert (first.cause, first.step) == ("overflow", 0), run.stderr
    assert first.location is not None
    assert "self.model(x)" in first.location.code or "self.inner(x)" in first.location.code
    assert first.fixes[0].verified, run.stderr
    assert "nonfinite-parameter" not in run.causes


@pytest.mark.parametrize("learner", [Listed, Cloned, Hung])
def test_singular_update_of_an_inner_loop_is_told(learner: type[Adapting], guard: Guard) -> None:
    """The step is differentiated again through the fast weights of its own, and not through the graph of the script's."""
    run = guard(lambda: _train(learner, 0.1, False, _scaled))
    assert run.faults == 0, run.stderr
    assert [(i.cause, i.step) for i in run.report.incidents] == [("singular-gradient", 0)], run.stderr
    assert run.first.location is not None
    assert run.first.location.code == "return [p - rate * g / ((g * g).sqrt() + 1e-3) for p, g in pairs]"


@pytest.mark.parametrize("is_first_order", [True, False])
@pytest.mark.parametrize("learner", [Listed, Cloned, Hung])
def test_healthy_inner_loop_is_clean_and_the_same(learner: type[Adapting], is_first_order: bool, guard: Guard) -> None:
    watched: list[Tensor] = []
    run = guard(lambda: watched.extend(_train(learner, 0.1, is_first_order)))
    assert run.faults == 0, run.stderr
    assert run.causes == [], run.stderr
    assert all(map(torch.equal, watched, _train(learner, 0.1, is_first_order)))
