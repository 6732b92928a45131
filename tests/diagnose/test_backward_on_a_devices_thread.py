"""On an accelerator autograd runs derivatives on a thread of its own: above an operator there is no frame but the guard's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch
from torch import Tensor, nn
from watching import Watched

from ampguard.compat import engine_call

BAD = 3


@pytest.fixture(autouse=True)
def no_frame_above_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """`sys._getframe` as it answers there: the frames of who called the engine are another thread's."""
    whole = sys._getframe

    def of_this_thread(depth: int = 0) -> FrameType:
        frame: FrameType | None = whole(1)
        for _ in range(depth):
            frame = frame.f_back if frame is not None else None
            if frame is None or frame.f_code is engine_call():
                raise ValueError("call stack is not deep enough")
        assert frame is not None
        return frame

    monkeypatch.setattr(sys, "_getframe", of_this_thread)


class Distance(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (a - b).pow(2).sum(1).sqrt().mean()


def test_a_derivative_that_is_not_finite_is_explained(guard: Callable[..., Watched]) -> None:
    def body() -> None:
        net, distance = nn.Linear(6, 4), Distance()
        optimizer = torch.optim.SGD(net.parameters(), 1e-2)
        for step in range(BAD + 2):
            a, b = torch.randn(8, 6), torch.randn(8, 6)
            if step == BAD:
                b[5] = a[5]
            optimizer.zero_grad()
            distance(net(a), net(b)).backward()
            optimizer.step()

    incident = guard(body).report.incidents[0]
    assert (incident.cause, incident.step, incident.module) == ("singular-gradient", BAD, "")
    assert incident.evidence["rung"] == "replay"


def test_flushed_gradients_are_proved(guard: Callable[..., Watched]) -> None:
    """Without a scaler: nothing but a replay of the backward pass in float32 shows that they should not be 0."""

    def body() -> None:
        net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
        optimizer = torch.optim.Adam(net.parameters(), 1e-3)
        for _ in range(20):
            x = torch.randn(256, 16)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = 1e-5 * nn.functional.mse_loss(net(x), x[:, :1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    incident = guard(body).report.incidents[0]
    assert incident.cause == "gradient-underflow"
    assert incident.fixes[0].action == "raise-loss-scale"
    assert incident.fixes[0].verified


def test_a_lone_relu_that_is_dead_is_no_underflow(guard: Callable[..., Watched]) -> None:
    """Its gradients are 0 in float32 as well."""

    def body() -> None:
        net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        nn.init.constant_(net[0].bias, -100.0)
        optimizer = torch.optim.Adam(net.parameters(), 1e-3)
        for _ in range(20):
            x = torch.randn(256, 16)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.mse_loss(net(x), x[:, :1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert not guard(body).report.incidents
