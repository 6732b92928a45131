"""A step that fails in two places: no fix of the first is enough, and both together are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampguard.diagnose.code.text import merged

Guard = Callable[..., Any]


class Pooled(nn.Module):
    """The mean of a set, made a unit vector: an empty set is 0/0, and then a vector of length 0."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(4, 6)

    def forward(self, members: Tensor, is_there: Tensor) -> Tensor:
        count = is_there.sum(1, keepdim=True)
        mean = (self.lift(members) * is_there[..., None]).sum(1) / count
        length = mean.square().sum(1, keepdim=True).sqrt()
        return mean / length


def body() -> None:
    torch.manual_seed(0)
    net = Pooled()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(4):
        is_there = torch.ones(5, 3)
        if step == 2:
            is_there[1] = 0
        loss = net(torch.randn(5, 3, 4), is_there).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_the_fix_changes_both_lines(guard: Guard) -> None:
    run = guard(body)
    assert run.faults == 0, run.stderr
    incident = run.first
    assert (incident.cause, incident.step) == ("division-by-zero", 2)
    assert incident.location.code.endswith("/ count")
    fix = incident.fixes[0]
    assert fix.verified, fix
    first, second = fix.how.split("\n")[:2]
    assert "mean = (self.lift" in first
    assert "length" in second
    assert first not in [other.how for other in incident.fixes[1:]]
    assert "its gradients too" in fix.outcome


class Focal(torch.autograd.Function):
    """A focal loss with a backward of its own, in which a probability of 0 breaks two terms of one line."""

    @staticmethod
    def forward(ctx: Any, logit: Tensor) -> Tensor:
        p = torch.sigmoid(logit)
        ctx.save_for_backward(p)
        return ((1 - p) ** 2 * -torch.log(p.clamp(min=1e-12))).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (p,) = ctx.saved_tensors
        slope = 2 * (1 - p) * torch.log(p) - (1 - p) ** 2 / p
        return gradient * slope * p * (1 - p) / p.numel()


def test_two_changes_of_one_statement_are_written_as_one(guard: Guard) -> None:
    def train() -> None:
        torch.manual_seed(0)
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        for step in range(4):
            x = torch.randn(8, 4)
            if step == 2:
                x[3] = -1e4 * net.weight.detach().sign()
            loss = Focal.apply(net(x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(train)
    assert run.faults == 0, run.stderr
    fix = run.first.fixes[0]
    assert (run.first.step, fix.action, fix.verified) == (2, "add-epsilon", True)
    assert fix.how == "slope = 2 * (1 - p) * torch.log(p + 1e-6) - (1 - p) ** 2 / (p + 1e-6)"


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        ("r = a / (b + 1) + c / d", "r = a / b + c / (d + 1)", "r = a / (b + 1) + c / (d + 1)"),
        ("r = a / b + c / (d + 1)", "r = a / (b + 1) + c / d", "r = a / (b + 1) + c / (d + 1)"),
        ("r = a / (b + 1e-6) + c / d", "r = a / b.clamp(max=80) + c / d", None),
        ("r = (a / b + 1) + c / d", "r = a / abs(b) + c / d", "r = a / abs(b) + 1 + c / d"),
        ("r = a / exp(b) + c / d", "r = a / log(b) + c / d", None),
        ("leave it out: r = a / b + c / d", "r = a / b + c / (d + 1)", None),
        ("r = a / b + c / (d + 1)", "really leave it out", None),
    ],
)
def test_changes_of_one_statement(one: str, other: str, both: str | None) -> None:
    assert merged("r = a / b + c / d", one, other) == both


def test_a_change_around_a_change() -> None:
    """A divisor gets an epsilon, and what it is computed from a bound: the one's text ends where the other's begins."""
    statement = "loss = (s + ((t - m) / torch.exp(s)) ** 2).mean()"
    one = "loss = (s + ((t - m) / (torch.exp(s) + 1e-6)) ** 2).mean()"
    other = "loss = (s + ((t - m) / torch.exp(s.clamp(max=80))) ** 2).mean()"
    both = "loss = (s + ((t - m) / (torch.exp(s.clamp(max=80)) + 1e-6)) ** 2).mean()"
    assert merged(statement, one, other) == merged(statement, other, one) == both


class Grid(nn.Module):
    """Three coordinates, each divided by a size of its own that may be 0: `2 * x / (w - 1) - 1`."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(4, 3)

    def forward(self, points: Tensor, sizes: tuple[int, int, int]) -> Tensor:
        d, h, w = sizes
        x, y, z = self.lift(points).split([1, 1, 1], dim=-1)
        x = 2 * x / (w - 1) - 1
        y = 2 * y / (h - 1) - 1
        z = 2 * z / (d - 1) - 1
        return torch.cat([x, y, z], dim=-1)


def test_three_lines_of_one_fault_are_one_fix(guard: Guard) -> None:
    def train() -> None:
        torch.manual_seed(0)
        net = Grid()
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        for step in range(6):
            sizes = (1, 1, 1) if step == 2 else (4, 4, 1) if step == 4 else (4, 4, 4)
            points = torch.randn(8, 4)
            loss = net(points, sizes).square().mean()
            optimizer.zero_grad()
            if loss.isfinite():
                loss.backward()
                optimizer.step()

    run = guard(train)
    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.step, incident.cause, incident.occurrences) == (2, "division-by-zero", 2)
    fix = incident.fixes[0]
    assert fix.verified, incident.fixes
    first, second, third = fix.how.split("\n")
    assert first == "x = 2 * x / max(w - 1, 1) - 1"
    assert second.startswith("y = 2 * y / max(h - 1, 1) - 1  # ")
    assert third.startswith("z = 2 * z / max(d - 1, 1) - 1  # ")
