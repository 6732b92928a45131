"""The line at which a layer came into a model, where no optimizer holds it."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]


def grown(old: nn.Linear, width: int) -> nn.Sequential:
    head = nn.Sequential()
    head.add_module("fc", nn.Linear(old.in_features, width))
    return head


def trained(how: str, step_of_change: int, helper: bool = False) -> None:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("body", nn.Linear(8, 16))
    model.add_module("head", nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if step_of_change < 0:
        model.head = nn.Linear(16, 5)  # changed
    for step in range(24):
        if step == step_of_change:
            if how == "attribute":
                model.head = grown(model.head, 5) if helper else nn.Linear(16, 5)  # changed
            elif how == "index":
                model[-1] = nn.Linear(16, 5)  # changed
            elif how == "weight":
                model.head.weight = nn.Parameter(model.head.weight.detach().clone())  # changed
            elif how == "normed":
                nn.utils.parametrizations.weight_norm(model.head)  # changed
            elif how == "added":
                model.add_module("last", nn.Linear(4, 5))  # changed
        optimizer.zero_grad()
        out = model(torch.randn(16, 8))
        nn.functional.cross_entropy(out, torch.randint(4, (16,))).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("how", "step_of_change", "helper"),
    [
        ("attribute", 8, False),
        ("attribute", 8, True),
        ("index", 8, False),
        ("added", 8, False),
        ("weight", 8, False),
        ("normed", 8, False),
        ("attribute", -1, False),
    ],
)
def test_it_is_the_line_of_the_failure(guard: Guard, how: str, step_of_change: int, helper: bool) -> None:
    run = guard(lambda: trained(how, step_of_change, helper))
    assert run.faults == 0, run.stderr
    (incident,) = (i for i in run.report.incidents if i.cause == "stale-parameters")
    assert incident.step == max(step_of_change, 0)
    assert incident.location.code.endswith("# changed") or "nn.Linear" in incident.location.code, incident.location
    assert incident.location.function == "trained"
    assert "optimizer.step()" in incident.explanation


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Trainer:
    def __init__(self) -> None:
        self.net = Small()
        self.best = copy.deepcopy(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)

    def restore(self, how: str) -> None:
        if how == "copied":
            self.net = copy.deepcopy(self.best)
        elif how == "made":
            self.net = Small()
        elif how == "loaded":
            kept = io.BytesIO()
            torch.save(self.best, kept)
            kept.seek(0)
            self.net = torch.load(kept, weights_only=False)

    def step(self) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.net(torch.randn(8, 6)), torch.randint(3, (8,))).backward()
        self.optimizer.step()


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("copied", "self.net = copy.deepcopy(self.best)"),
        ("made", "self.net = Small()"),
        ("loaded", "self.net = torch.load(kept, weights_only=False)"),
    ],
)
def test_a_model_that_takes_the_place_of_the_trained_one(how: str, code: str, guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        trainer = Trainer()
        for it in range(24):
            if it == 12:
                trainer.restore(how)
            trainer.step()

    run = guard(body)
    assert (run.faults, run.causes, run.first.step) == (0, ["stale-parameters"], 12), run.stderr
    assert run.first.location.code == code
    assert "steps at test_put_in.py" in run.first.explanation


def test_two_heads_that_are_made_anew(guard: Guard) -> None:
    """The first of them is told."""

    class Duel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, 8)
            self.reset()

        def reset(self) -> None:
            self.value = nn.Linear(8, 1)
            self.advantage = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.relu(self.body(x))
            return self.value(h) + self.advantage(h)

    def body() -> None:
        torch.manual_seed(0)
        model = Duel()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for it in range(24):
            if it == 12:
                model.reset()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.randn(8, 6)), torch.randint(3, (8,))).backward()
            optimizer.step()

    run = guard(body)
    assert (run.faults, run.causes, run.first.step) == (0, ["stale-parameters"], 12), run.stderr
    assert run.first.location.code == "self.value = nn.Linear(8, 1)"
