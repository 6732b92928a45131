"""An overflow that shows only as a zero: x / Inf is 0, and 0 / 0 or a logarithm is where NaN and Inf begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampguard.capture.glue import schedule
from ampguard.capture.root_calls import pace

Guard = Callable[..., Any]


@torch.no_grad()
def sinkhorn(scores: Tensor) -> Tensor:
    q = torch.exp(scores / 0.05).t()
    q /= torch.sum(q)
    for _ in range(3):
        q /= q.sum(1, keepdim=True)
        q /= q.sum(0, keepdim=True)
    return q.t()


def shares(scores: Tensor) -> Tensor:
    weights = scores * 4000
    total = weights.sum(1, keepdim=True)
    part = weights / total
    return part / part.sum(1, keepdim=True)


def log_shares(scores: Tensor) -> Tensor:
    weights = scores * 4000
    total = weights.sum(1, keepdim=True)
    return torch.log(weights / total)


def training(criterion: Callable[[Tensor], Tensor], size: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Sigmoid())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(3):
        with torch.autocast("cpu", dtype=torch.float16):
            scores = model[0](torch.randn(16, 8)).sigmoid() * (size if step == 1 else 0.05)
            loss = (criterion(scores).float() * scores.float()).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("criterion", "size", "code", "op"),
    [
        (sinkhorn, 0.5, "q /= torch.sum(q)", "aten.sum"),
        (shares, 1.0, "total = weights.sum(1, keepdim=True)", "aten.sum"),
        (log_shares, 1.0, "total = weights.sum(1, keepdim=True)", "aten.sum"),
    ],
)
def test_the_overflow_is_told(
    guard: Guard, criterion: Callable[[Tensor], Tensor], size: float, code: str, op: str
) -> None:
    run = guard(lambda: training(criterion, size))
    assert run.faults == 0, run.stderr
    first = run.first
    assert (first.cause, first.step) == ("fp16-overflow", 1)
    assert first.op.startswith(op)
    assert first.location.code == code
    assert "The infinity itself goes no further" in first.explanation
    assert first.evidence["max_abs_fp32"] > 65504
    assert first.fixes[0].action == "force-fp32"
    assert first.fixes[0].verified


def test_the_overflow_is_told_where_calls_are_kept(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view is taken behind writes that are told later than the view."""
    monkeypatch.setattr(schedule, "LONG_STEP", 60.0)
    for room in (schedule, pace):
        monkeypatch.setattr(room, "FREE_SECONDS", 0.0)
    run = guard(lambda: training(sinkhorn, 0.5))
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.location.code) == ("fp16-overflow", "q /= torch.sum(q)")


class BoxLoss(nn.Module):
    """IoU of boxes: an area of Inf makes it 0."""

    def forward(self, sides: Tensor) -> Tensor:
        area = (sides[:, 0] + sides[:, 1]) * (sides[:, 2] + sides[:, 3])
        overlap = sides.amin(1)
        return -torch.log((overlap + 1.0) / (area + 1.0)).mean()


def test_the_overflow_within_a_module_is_told(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model, criterion = nn.Linear(8, 4), BoxLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                sides = model(torch.randn(16, 8)).sigmoid() * (400.0 if step == 1 else 4.0)
                loss = criterion(sides)
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    first = run.first
    assert (first.cause, first.step, first.op) == ("fp16-overflow", 1, "aten.mul.Tensor")
    assert first.location.code.startswith("area = ")
    assert first.fixes[0].verified


def test_a_zero_of_its_own_is_an_underflow(guard: Guard) -> None:
    def flushed(scores: Tensor) -> Tensor:
        small = scores * 1e-5 * 1e-4
        return torch.log(small / (small.sum(1, keepdim=True) + 1))

    run = guard(lambda: training(flushed, 1.0))
    assert run.faults == 0, run.stderr
    assert run.first.cause == "fp16-underflow"


def test_an_overflow_beside_it_is_not_what_fails(guard: Guard) -> None:
    """What is far away weighs 0, by 1 / Inf or without; what is added to that is flushed by itself."""

    def weighed(scores: Tensor) -> Tensor:
        far = (scores * 4000).square()
        weight = 0.0 / far
        factor = 1e-5 if scores.max() > 0.3 else 1.0
        small = weight + scores * factor * factor
        return torch.log(small / (small + 1))

    run = guard(lambda: training(weighed, 1.0))
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.step) == ("fp16-underflow", 1)
    assert run.first.location.code.startswith("return torch.log(small")


def test_operands_are_those_of_before_a_write(guard: Guard) -> None:
    """What the operator was given is overwritten behind it, by the very line that it is in."""

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Linear(8, 64)
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.float16):
                weights = model(torch.randn(16, 8)).sigmoid() * 3000
                total = weights.sum()
                weights.mul_(0)
                loss = (weights.float() + total.float()).mean()
            loss.backward()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.first.cause == "fp16-overflow"
    assert run.first.evidence["max_abs_fp32"] > 65504


def mixed(logits: Tensor, others: Tensor) -> Tensor:
    """A mixture's likelihood, with log-sum-exp by hand twice: where the first overflows, nothing is left for the second."""
    weights = logits - logits.exp().sum(1, keepdim=True).log()
    return (weights + others).exp().sum(1).log()


def mixed_in_place(logits: Tensor, others: Tensor) -> Tensor:
    weights = logits - logits.clone().exp_().sum(1, keepdim=True).log()
    return (weights + others).exp().sum(1).log()


def in_float32(
    far: Callable[[Tensor], Tensor], likelihood: Callable[[Tensor, Tensor], Tensor] = mixed
) -> Callable[[], None]:
    def script() -> None:
        torch.manual_seed(0)
        model = nn.Linear(8, 6)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(4):
            logits = model(torch.randn(16, 8))
            loss = -likelihood(far(logits) if step == 2 else logits, torch.zeros(16, 6)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return script


def test_an_overflow_of_float32_is_told(guard: Guard) -> None:
    run = guard(in_float32(lambda logits: logits + torch.tensor([95.0, 0, 0, 0, 0, 0])))
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.step, run.first.op) == ("overflow", 2, "aten.exp.default")
    assert run.first.location.code == "weights = logits - logits.exp().sum(1, keepdim=True).log()"
    assert "The infinity itself goes no further" in run.first.explanation
    assert (run.first.fixes[0].action, run.first.fixes[0].verified) == ("stable-form", True)
    assert "torch.logsumexp(logits, 1" in run.first.fixes[0].how


def test_an_overflow_of_float32_in_place_is_told(guard: Guard) -> None:
    run = guard(in_float32(lambda logits: logits + torch.tensor([95.0, 0, 0, 0, 0, 0]), mixed_in_place))
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.step) == ("overflow", 2)
    assert run.first.location.code == "weights = logits - logits.clone().exp_().sum(1, keepdim=True).log()"


@pytest.mark.parametrize("is_beside_an_infinity", [True, False])
def test_an_infinity_that_leaves_the_failure_alone_is_not(is_beside_an_infinity: bool, guard: Guard) -> None:
    """A row whose logits are all far below: its sum underflows by itself, whatever x / Inf is."""

    def far(logits: Tensor) -> Tensor:
        low = logits.clone()
        low[3] = low[3] - 200.0
        return low + 1.0 / (logits[0, 0] * 1e30 * 1e30).abs() if is_beside_an_infinity else low

    run = guard(in_float32(far))
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.step) != ("overflow", 2)
    assert run.first.step == 2
