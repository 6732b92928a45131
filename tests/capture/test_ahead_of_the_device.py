"""Gradients on a device without a scaler: bad ones are known a step later, and told with the weights as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import LateFlag, Watched, fingerprint, seed_everything

import ampguard
from ampguard.capture import gradients, on_device
from ampguard.capture.judging import judge
from ampguard.capture.on_device import DeviceGradients

Guard = Callable[..., Watched]
BAD = 6
STEPS = 41
"""By then what follows a backward pass is not taped."""


@pytest.fixture(autouse=True)
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at gradients before they are used, as it would mean to wait: the script runs ahead of the device."""
    monkeypatch.setattr(gradients, "all_finite_on_cpu", lambda tensors: True)
    monkeypatch.setattr(gradients, "HAS_CUDA", True)
    monkeypatch.setattr(on_device, "is_immediate", lambda tensor: False)
    monkeypatch.setattr(DeviceGradients, "_may_wait", lambda self: False)


class Reciprocal(torch.autograd.Function):
    """Its derivative overflows float16 where it does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = 1.0 / x.half()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return -grad * (y * y)


class Contrast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * Reciprocal.apply(self.gain * x.abs().amax(1, keepdim=True))  # type: ignore[no-any-return]


class Distance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.fc(x) - self.fc(x.roll(1, 0))).pow(2).sum(1).sqrt()


def train(
    model_of: Callable[[], nn.Module], optimizer_of: Any = torch.optim.SGD, steps: int = BAD + 4, bad: int | None = BAD
) -> Callable[[], Any]:
    def body() -> Any:
        seed_everything()
        model = model_of()
        optimizer = optimizer_of(model.parameters(), 1e-2)
        for step in range(steps):
            x = torch.randn(8, 4)
            if step == bad:
                x[3] = x[4] * 1e-4 if isinstance(model[0], Contrast) else x[4]
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16, enabled=isinstance(model[0], Contrast)):
                loss = (model(x).float().reshape(8) - x[:, 0]).square().mean()
            loss.backward()
            optimizer.step()
        return fingerprint(model, optimizer)

    return body


def contrast() -> nn.Module:
    return nn.Sequential(Contrast(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def distance() -> nn.Module:
    return nn.Sequential(Distance())


@pytest.mark.parametrize("optimizer_of", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("rest", [0, 1, 4])
def test_an_overflow_that_no_loss_shows(rest: int, optimizer_of: Any, guard: Guard) -> None:
    """An infinite gain makes its factor 0: the losses stay finite, and the run ends well for all that one sees."""
    body = train(contrast, optimizer_of, steps=BAD + 1 + rest)
    plain = body()
    run = guard(body)
    assert run.result == plain
    assert (run.faults, run.causes) == (0, ["gradient-overflow"]), run.stderr
    first = run.first
    assert (first.step, first.module, first.evidence["rung"]) == (BAD, "0", "replay")
    assert first.evidence["max_abs_fp32"] > 65504
    assert {fix.action: fix.verified for fix in first.fixes}["use-bf16"]


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("optimizer_of", [torch.optim.SGD, torch.optim.AdamW])
def test_a_singular_derivative_and_the_losses_behind_it(
    optimizer_of: Any, is_slow: bool, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`is_slow`: the next step's loss is not judged either when its gradients come."""
    if is_slow:
        monkeypatch.setattr(judge, "FiniteFlag", LateFlag)
    run = guard(train(distance, optimizer_of))
    assert (run.faults, run.causes) == (0, ["singular-gradient"]), run.stderr
    assert (run.first.step, run.first.module) == (BAD, "0")


@pytest.mark.parametrize("model_of", [contrast, distance])
def test_healthy_steps(model_of: Callable[[], nn.Module], guard: Guard) -> None:
    body = train(model_of, bad=None)
    plain = body()
    run = guard(body)
    assert run.result == plain
    assert not run.report.incidents, run.stderr


def test_no_room_for_copies(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "available_bytes", lambda like: 100)
    body = train(distance)
    plain = body()
    run = guard(body)
    assert (run.result, run.faults) == (plain, 0)
    assert (run.first.cause, run.first.step, run.first.phase) == ("unexplained", BAD, "backward")
    assert "the script runs ahead of it" in run.first.evidence["not_replayed_because"]


def test_copies_are_small_beside_what_the_script_takes(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "peak_bytes", lambda like: 100)
    run = guard(train(distance))
    assert (run.first.cause, run.first.step) == ("unexplained", BAD)


def test_two_optimizers_in_turn(guard: Guard) -> None:
    """The second one's loss is computed from weights that the first one has just updated."""

    def body() -> Any:
        seed_everything()
        one, two = contrast(), distance()
        first, second = torch.optim.SGD(one.parameters(), 1e-2), torch.optim.Adam(two.parameters(), 1e-2)
        for step in range(BAD + 4):
            x = torch.randn(8, 4)
            first.zero_grad()
            one(x).float().mean().backward()
            first.step()
            x = x.clone()
            if step == BAD:
                x[3] = x[4]
            second.zero_grad()
            (two(x).mean() + one(x).detach().mean()).backward()
            second.step()
        return fingerprint(one, first), fingerprint(two, second)

    plain = body()
    run = guard(body)
    assert run.result == plain
    assert (run.faults, run.causes) == (0, ["singular-gradient"]), run.stderr
    assert run.first.step == BAD


def test_weights_read_outside_modules_and_statistics_that_move(guard: Guard) -> None:
    """A penalty on the weights, and running statistics: both are those of the step that is run again."""

    def body() -> Any:
        seed_everything()
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.2))
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for step in range(BAD + 3):
            x = torch.randn(8, 4)
            out = model(x)
            shift = torch.zeros(8) if step == BAD else torch.ones(8)
            penalty = sum(p.square().sum() for p in model.parameters())
            loss = (
                out.sum(1) * (0 * out.sum(1).detach() if step == BAD else 1) + shift
            ).abs().sqrt().mean() + 1e-3 * penalty
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return fingerprint(model, optimizer)

    plain = body()
    run = guard(body)
    assert run.result == plain
    assert (run.faults, run.causes) == (0, ["singular-gradient"]), run.stderr
    assert (run.first.step, run.first.evidence["rung"]) == (BAD, "replay")


def test_a_batch_that_lies_in_the_same_memory_in_each_step(guard: Guard) -> None:
    """It has been overwritten by the next one when the answer comes: that the gradients were bad is said all the same."""

    def body() -> Any:
        seed_everything()
        model, batch = distance(), torch.empty(1 << 15, 4)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for step in range(BAD + 3):
            batch.copy_(torch.randn(1 << 15, 4))
            if step == BAD:
                batch[3] = batch[4]
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()
        return fingerprint(model, optimizer)

    plain = body()
    run = guard(body)
    assert (run.result, run.faults) == (plain, 0)
    assert run.report.incidents
    assert run.first.step == BAD


def test_gradients_of_a_loss_that_is_yet_to_be_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script stops at the bad loss: its gradients, which no optimizer has used, are no news."""
    monkeypatch.setattr(judge, "FiniteFlag", LateFlag)
    seed_everything()
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with contextlib.suppress(SystemExit), ampguard.watch(out=tmp_path / "run") as session:
        for step in range(STEPS + 1):
            loss = (model(torch.ones(5, 4)).abs() + (1000.0 if step == STEPS else 0.0)).exp().mean()
            optimizer.zero_grad()
            loss.backward()
            if not torch.isfinite(loss):
                raise SystemExit(2)
            optimizer.step()
    (incident,) = session.report.incidents
    assert (incident.cause, incident.step, incident.phase) == ("overflow", STEPS, "loss")
