"""A script that looks for bad gradients itself, and gives the iteration up before the scaler is asked: no scale comes down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]


class Loop:
    """Targets of 2000 overflow float16 at a scale of 65536, and fit at 16."""

    def __init__(self, scale: float) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.opt = torch.optim.SGD(self.net.parameters(), 1e-6)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=4)

    def backward(self, is_singular: bool = False) -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.net(torch.randn(32, 8)).squeeze(-1)
        loss = nn.functional.mse_loss(out.float(), torch.randn(32) * 2000.0)
        if is_singular:
            loss = loss + (out.float() * 0).sum().sqrt()
        self.scaler.scale(loss).backward()

    def is_finite(self) -> bool:
        return all(bool(p.grad.isfinite().all()) for p in self.net.parameters() if p.grad is not None)

    def step(self) -> None:
        self.scaler.step(self.opt)
        self.scaler.update()


def told(run: Any) -> list[tuple[str, str]]:
    return [(i.cause, i.severity) for i in run.report.incidents]


@pytest.mark.parametrize("clears", ["opt", "net"])
@pytest.mark.parametrize("scale", [16.0, 65536.0])  # it grows till it does not fit; or it never fits
def test_nothing_lowers_the_scale(scale: float, clears: str, guard: Guard) -> None:
    def body() -> None:
        loop = Loop(scale)
        for _ in range(80):
            loop.backward()
            if not loop.is_finite():
                getattr(loop, clears).zero_grad()
                continue
            loop.step()
            loop.opt.zero_grad()

    (incident,) = guard(body).report.incidents
    assert (incident.cause, incident.severity, incident.mode) == ("missing-update", "error", "train")
    assert "zero_grad()" in incident.location.code
    assert "the gradients are finite" in incident.explanation
    assert (incident.step == 0) is (scale == 65536.0)


def test_the_next_iteration_clears(guard: Guard) -> None:
    def body() -> None:
        loop = Loop(65536.0)
        for _ in range(12):
            loop.opt.zero_grad()
            loop.backward()
            if not loop.is_finite():
                continue
            loop.step()

    assert told(guard(body)) == [("missing-update", "error")]


def test_a_loop_that_lets_the_scaler_skip(guard: Guard) -> None:
    def body() -> None:
        loop = Loop(65536.0)
        for _ in range(40):
            loop.opt.zero_grad()
            loop.backward()
            loop.is_finite()
            loop.step()

    assert told(guard(body)) == [("loss-scale-overflow", "info")]


def test_where_no_scale_would_help_giving_up_is_right(guard: Guard) -> None:
    def body() -> None:
        loop = Loop(16.0)
        for it in range(60):
            loop.backward(is_singular=it in (20, 30, 40))
            if not loop.is_finite():
                loop.opt.zero_grad()
                continue
            loop.step()
            loop.opt.zero_grad()
            if loop.scaler.get_scale() > 32.0:
                loop.scaler.update(16.0)

    causes = [cause for cause, _ in told(guard(body))]
    assert causes == ["singular-gradient"]
