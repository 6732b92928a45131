"""A replay runs a forward pass again: whatever state it changes must be as it was, or the training is another one."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ampguard

torch.set_num_threads(1)


class Bank:
    def __init__(self) -> None:
        self.features = torch.zeros(4)
        self.count = 0


BANK = Bank()
TABLE = torch.zeros(4)
GENERATOR = np.random.default_rng(0)
COUNT = itertools.count()
SHARED = itertools.count()


class Registry(OrderedDict[str, Any]):
    """Makes what it is asked for, as transformers' table of activations does."""

    def __getitem__(self, key: str) -> Any:
        kind, count = super().__getitem__(key)
        return kind(count["needed"])


REGISTRY = Registry(counter=(float, {"made": 0}))


class Stateful(nn.Module):
    total = 0
    turns = itertools.count()

    def __init__(self, change: Callable[[Any, Tensor], float]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.change = change
        self.bank = Bank()
        self.queue = [torch.zeros(4)]
        self.rng = np.random.default_rng(3)
        self.generator = torch.Generator().manual_seed(2)
        self.array = np.zeros(2)
        self.numbers = iter(range(99))
        self.dice = random.Random(0)
        self.shared = SHARED
        closed_over = itertools.count()
        self.closed_over = lambda: closed_over

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return (h + 0.1 * self.change(self, h.detach().float().mean(0))).pow(2).mean()


def in_an_object(m: Any, d: Tensor) -> float:
    m.bank.features.add_(d)
    m.bank.count += 1
    return float(m.bank.features.sum()) + m.bank.count


def in_a_list(m: Any, d: Tensor) -> float:
    m.queue[0].add_(d)
    return float(m.queue[0].sum())


def in_a_global_object(m: Any, d: Tensor) -> float:
    BANK.count += 1
    return BANK.count


def in_a_global_tensor(m: Any, d: Tensor) -> float:
    TABLE.add_(d)
    return float(TABLE.sum())


def in_a_class(m: Any, d: Tensor) -> float:
    Stateful.total += 1
    return Stateful.total


def in_generators(m: Any, d: Tensor) -> float:
    drawn = torch.rand((), generator=m.generator)
    return float(GENERATOR.random() + m.rng.random() + m.dice.random()) + float(drawn)


def in_an_array(m: Any, d: Tensor) -> float:
    m.array += 1
    return float(m.array.sum())


def in_a_registry(m: Any, d: Tensor) -> float:
    count = OrderedDict.__getitem__(REGISTRY, "counter")[1]
    count["made"] += 1
    return float(count["made"])


def in_iterators(m: Any, d: Tensor) -> float:
    return float(next(m.numbers) + next(COUNT))


def in_iterators_held_elsewhere(m: Any, d: Tensor) -> float:
    return float(next(m.shared) + next(m.turns) + next(m.closed_over()))


def in_a_parameter(m: Any, d: Tensor) -> float:
    m.layer.bias.data.add_(0.01)
    m.layer.weight.data = m.layer.weight.data * 0.9
    return 0.0


KINDS = [in_an_object, in_a_list, in_a_global_object, in_a_global_tensor, in_a_class, in_generators, in_an_array,
         in_iterators, in_iterators_held_elsewhere, in_a_parameter, in_a_registry]  # fmt: skip


def losses(change: Callable[[Any, Tensor], float]) -> list[float]:
    global BANK, TABLE, GENERATOR, COUNT, SHARED
    BANK, TABLE, GENERATOR, COUNT = Bank(), torch.zeros(4), np.random.default_rng(0), itertools.count()
    SHARED = itertools.count()
    Stateful.total, Stateful.turns = 0, itertools.count()
    OrderedDict.__getitem__(REGISTRY, "counter")[1]["made"] = 0
    torch.manual_seed(0)
    model = Stateful(change)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)  # the first steps are skipped, and so replayed
    found = []
    for _ in range(4):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.randn(2, 4))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(float(loss.detach()))
    return [*found, float(next(SHARED))]


@pytest.mark.parametrize("change", KINDS, ids=lambda kind: kind.__name__)
def test_state_of_a_forward_pass_is_put_back(change: Callable[[Any, Tensor], float], tmp_path: Path) -> None:
    plain = losses(change)
    with ampguard.watch(out=tmp_path / "run") as session:
        guarded = losses(change)
    assert guarded == plain
    assert session.report is not None
    assert [i.cause for i in session.report.incidents] == ["loss-scale-overflow"], "else nothing was replayed"


class Counting(torch.autograd.Function):
    """Its state enters what it computes."""

    calls = 0
    seen: list[int] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Counting.calls += 1
        Counting.seen.append(Counting.calls)
        return x * (1.0 + 0.01 * len(Counting.seen))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Counting.calls += 100
        return gradient * 2.0


def twice(x: Tensor) -> Tensor:
    return cast(Tensor, Counting.apply(Counting.apply(x)))


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return twice(self.inner(x))


@pytest.mark.parametrize("is_within", [True, False])
def test_state_of_a_custom_function_is_put_back(is_within: bool, tmp_path: Path) -> None:
    def train() -> list[float]:
        Counting.calls = 0
        Counting.seen.clear()
        torch.manual_seed(0)
        model = Calls() if is_within else nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for step in range(6):
            x = torch.randn(2, 4) / (step != 3)
            loss = (model(x) if is_within else twice(model(x))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if loss.isfinite():
                optimizer.step()
            found.append(float(loss.detach()))
        return [*found[:3], *found[4:], float(Counting.calls), float(len(Counting.seen))]

    plain = train()
    with ampguard.watch(out=tmp_path / "run") as session:
        guarded = train()
    assert guarded == plain
    assert session.report is not None
    assert [i.cause for i in session.report.incidents if i.severity == "error"], "else nothing was replayed"
