"""Averages of the weights that a script keeps in low precision, and that rounding keeps where they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import fingerprint

from ampguard.capture.protocol.hidden_averages import Seen

Guard = Callable[..., Any]
Write = Callable[[Tensor, Tensor, float], Any]

LOST: dict[str, Write] = {
    "multiplied and added": lambda mean, p, m: mean.mul_(m).add_(p.detach(), alpha=1 - m),
    "interpolated": lambda mean, p, m: mean.lerp_(p, 1 - m),
    "copied": lambda mean, p, m: mean.copy_(m * mean + (1 - m) * p),
    "a difference": lambda mean, p, m: mean.sub_((1 - m) * (mean - p)),
}


def train(write: Write, momentum: float, dtype: torch.dtype, rate: float = 0.05, steps: int = 36) -> dict[str, Any]:
    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)
    teacher = copy.deepcopy(student).requires_grad_(False)
    with torch.no_grad():
        for p in student.parameters():
            p.add_(0.05 * torch.randn_like(p))
    optimizer = torch.optim.SGD(student.parameters(), lr=rate)
    for _ in range(steps):
        x = torch.randn(8, 8).to(dtype)
        with torch.no_grad():
            target = teacher(x)
        loss = (student(x) - target - 0.1).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, p in zip(teacher.parameters(), student.parameters(), strict=True):
                write(mean, p, momentum)
    return fingerprint(student, optimizer)


@pytest.mark.parametrize("name", LOST)
def test_an_average_that_stands_still(name: str, guard: Guard) -> None:
    write = LOST[name]
    plain = train(write, 0.9998, torch.bfloat16)
    run = guard(lambda: train(write, 0.9998, torch.bfloat16))
    assert run.faults == 0, run.stderr
    assert run.result == plain
    assert run.causes == ["lost-update"]
    incident = run.first
    assert (incident.severity, incident.step, incident.dtype) == ("warning", 16, "bfloat16")
    assert incident.location.code.startswith(f'"{name}"')
    assert incident.evidence["stuck_share"] > 0.5
    assert incident.evidence["update"] < incident.evidence["spacing"]
    assert incident.fixes[0].verified


@pytest.mark.parametrize(("momentum", "dtype"), [(0.9, torch.bfloat16), (0.9998, torch.float32), (0.9, torch.float16)])
def test_an_average_that_moves(momentum: float, dtype: torch.dtype, guard: Guard) -> None:
    run = guard(lambda: train(LOST["multiplied and added"], momentum, dtype))
    assert run.faults == 0, run.stderr
    assert run.causes == []


@pytest.mark.parametrize("write", [lambda mean, p, m: mean.clamp_(-9, 9), lambda mean, p, m: mean.copy_(mean.clone())])
def test_a_copy_that_is_meant_to_stay(write: Write, guard: Guard) -> None:
    assert guard(lambda: train(write, 0.5, torch.bfloat16)).causes == []


Remake = Callable[[dict[str, Tensor], str, Tensor, float], Any]


def _anew(mean: dict[str, Tensor], name: str, p: Tensor, m: float) -> None:
    mean[name] = mean[name] * m + p.data * (1 - m)


def _lerp(mean: dict[str, Tensor], name: str, p: Tensor, m: float) -> None:
    mean[name] = torch.lerp(mean[name], p.detach().to(mean[name].dtype), 1 - m)


def _in_place(mean: dict[str, Tensor], name: str, p: Tensor, m: float) -> None:
    mean[name].mul_(m).add_(p.detach(), alpha=1 - m)


REMADE: dict[str, Remake] = {"anew": _anew, "interpolated": _lerp, "in place": _in_place}


def train_with_dictionary(remake: Remake, momentum: float, dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).bfloat16()
    mean = {name: p.detach().to(dtype, copy=True) for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(72):
        x = torch.randn(8, 8)
        loss = nn.functional.cross_entropy(model(x.bfloat16()).float(), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                remake(mean, name, p, momentum)
    return fingerprint(model, optimizer)


@pytest.mark.parametrize("name", REMADE)
def test_an_average_that_no_module_holds(name: str, guard: Guard) -> None:
    plain = train_with_dictionary(REMADE[name], 0.9995, torch.bfloat16)
    run = guard(lambda: train_with_dictionary(REMADE[name], 0.9995, torch.bfloat16))
    assert run.faults == 0, run.stderr
    assert run.result == plain
    assert run.causes == ["lost-update"]
    incident = run.first
    assert (incident.severity, incident.step, incident.dtype) == ("warning", 32, "bfloat16")
    assert incident.location.code.startswith("mean[name]")
    assert incident.evidence["stuck_share"] > 0.5
    assert incident.evidence["update"] < incident.evidence["spacing"]
    assert incident.fixes[0].verified


@pytest.mark.parametrize(("momentum", "dtype"), [(0.5, torch.bfloat16), (0.9995, torch.float32)])
@pytest.mark.parametrize("name", REMADE)
def test_an_average_that_no_module_holds_and_that_moves(
    name: str, momentum: float, dtype: torch.dtype, guard: Guard
) -> None:
    assert guard(lambda: train_with_dictionary(REMADE[name], momentum, dtype)).causes == []


class Momentum(nn.Module):
    """Two encoders; the second is written in the forward pass of both, where no operator is recorded."""

    def __init__(self, write: Callable[[nn.Parameter, nn.Parameter, int], None]) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 8))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.write, self.calls = write, 0

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
                self.write(q, k, self.calls)
            self.calls += 1
            key = nn.functional.normalize(self.key(x), dim=1)
        return nn.functional.normalize(self.query(x), dim=1) @ key.T / 0.2


def given_new_data(q: nn.Parameter, k: nn.Parameter, call: int) -> None:
    k.data = k.data * 0.999 + q.data * 0.001


def in_place(q: nn.Parameter, k: nn.Parameter, call: int) -> None:
    k.mul_(0.999).add_(q, alpha=0.001)


def fast(q: nn.Parameter, k: nn.Parameter, call: int) -> None:
    k.data = k.data * 0.5 + q.data * 0.5


def at_times(q: nn.Parameter, k: nn.Parameter, call: int) -> None:
    if call % 20 == 0:
        k.data = q.data.clone()


def never(q: nn.Parameter, k: nn.Parameter, call: int) -> None:
    k.data = k.data.clone()


def train_momentum(write: Any, dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Momentum(write).to(dtype)
    optimizer = torch.optim.SGD(model.query.parameters(), 0.3, momentum=0.9)
    for _ in range(68):
        logits = model(torch.randn(24, 12).to(dtype))
        loss = nn.functional.cross_entropy(logits.float(), torch.arange(24))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return fingerprint(model, optimizer)


@pytest.mark.parametrize("write", [given_new_data, in_place])
def test_an_average_that_a_module_writes_itself(write: Any, guard: Guard) -> None:
    plain = train_momentum(write, torch.bfloat16)
    run = guard(lambda: train_momentum(write, torch.bfloat16))
    assert run.faults == 0, run.stderr
    assert run.result == plain
    assert run.causes == ["lost-update"]
    assert (run.first.severity, run.first.step, run.first.module) == ("warning", 32, "key.0")
    assert run.first.evidence["update"] < run.first.evidence["spacing"]


@pytest.mark.parametrize(
    ("write", "dtype"),
    [
        (fast, torch.bfloat16),
        (at_times, torch.bfloat16),
        (never, torch.bfloat16),
        (given_new_data, torch.float32),
    ],
)
def test_what_a_module_writes_itself_and_is_right(write: Any, dtype: torch.dtype, guard: Guard) -> None:
    assert guard(lambda: train_momentum(write, dtype)).causes == []


def test_new_memory_that_is_known_by_the_key_of_the_first_is_a_write() -> None:
    """`k.data = ...` gives what was there before back, and what is made next may get its address again."""
    weight = nn.Parameter(torch.randn(64, 64))
    for size in range(16, 80, 4):
        average = nn.Parameter(torch.randn(size, size).bfloat16(), requires_grad=False)
        seen = Seen.of(average, weight, 0)
        for _ in range(50):
            average.data = average.data.clone()
            assert seen.was_written(average, 10**6)
