"""What breaks an iteration in its middle: a scaler's state that is loaded there, a window that is unscaled before it ends."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

Guard = Callable[..., Any]
SCALE = 1024.0


class Loop:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

    def backward(self, divisor: float = 1.0, weight: float = 1.0) -> None:
        x = torch.randn(12, 6)
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.model(x)
        self.scaler.scale(weight * F.mse_loss(out.float(), x[:, :2]) / divisor).backward()

    def clip(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def restored(before_backward: bool, scale: float) -> Callable[[], None]:
    def body() -> None:
        loop = Loop()
        other = copy.deepcopy(loop.scaler.state_dict()) | {"scale": scale}
        for step in range(24):
            if step == 17 and before_backward:
                loop.scaler.load_state_dict(other)
            loop.backward()
            if step == 17 and not before_backward:
                loop.scaler.load_state_dict(other)
            loop.update()

    return body


def test_a_scale_that_is_loaded_between_backward_and_step(guard: Guard) -> None:
    run = guard(restored(False, 128.0))
    assert run.faults == 0, run.stderr
    assert (run.causes, run.first.step) == (["accumulation-broken"], 17)
    assert run.first.evidence["factor"] == SCALE / 128.0
    assert run.first.location.code == "loop.scaler.load_state_dict(other)"
    assert "was loaded" in run.first.explanation


@pytest.mark.parametrize(("before_backward", "scale"), [(True, 128.0), (False, SCALE)])
def test_a_scale_that_is_loaded_where_it_does_no_harm(before_backward: bool, scale: float, guard: Guard) -> None:
    run = guard(restored(before_backward, scale))
    assert (run.faults, run.causes) == (0, [])


def unscaled_too_early(divisor: float, weight: float) -> Callable[[], None]:
    """From step 17 on an iteration is left before its step, with its gradients kept."""

    def body() -> None:
        loop = Loop()
        for step in range(24):
            late = step >= 17
            loop.backward(divisor if late else 1.0, weight)
            loop.clip()
            if late and step % 3:
                continue
            loop.update()

    return body


@pytest.mark.parametrize(
    ("divisor", "weight", "cause"),
    [
        (3.0, 1.0, "accumulation-broken"),
        (1.0, 1 / 3, "accumulation-broken"),
        (1.0, 1.0, "missing-update"),
        (1.0, 0.7, "missing-update"),
    ],
)
def test_a_loss_divided_by_a_whole_number_is_one_of_a_window(
    divisor: float, weight: float, cause: str, guard: Guard
) -> None:
    messages = []

    def body() -> None:
        with pytest.raises(RuntimeError) as raised:
            unscaled_too_early(divisor, weight)()
        messages.append(str(raised.value))

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert "already been called" in messages[0]
    assert (run.causes, run.first.step) == ([cause], 17)


@pytest.mark.parametrize("carries_over", [True, False])
def test_a_scaler_of_each_epochs_own(carries_over: bool, guard: Guard) -> None:
    """Windows of two micro-batches: the last one of an epoch of eleven is completed by the next epoch's first."""

    def body() -> None:
        loop, micro = Loop(), 0
        for epoch in range(4):
            loop.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE * 4.0**epoch)
            if not carries_over:
                loop.optimizer.zero_grad()
                micro = 0
            for _ in range(11):
                loop.backward(divisor=2.0)
                micro += 1
                if micro % 2 == 0:
                    loop.clip()
                    loop.update()

    run = guard(body)
    assert run.faults == 0, run.stderr
    if not carries_over:
        assert run.causes == []
        return
    incident = run.first
    assert (run.causes, incident.step, incident.evidence["factor"]) == (["accumulation-broken"], 5, 0.25)
    assert incident.evidence["scales"] == [SCALE, SCALE * 4]
    assert "a new scaler took the place" in incident.explanation
