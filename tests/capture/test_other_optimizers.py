"""Optimizers and scalers that are not quite PyTorch's: fastai steps a callback that shows its optimizer's groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import Watched, fingerprint, seed_everything

Guard = Callable[..., Watched]

STEPS = 40
BAD_STEP = 30


class PlainOptimizer:
    """No `torch.optim.Optimizer`: nobody's hooks run around its step."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        self.parameters, self.lr = parameters, lr
        self.state: dict[Any, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [{"params": self.parameters, "lr": self.lr}]

    def step(self) -> None:
        for p in self.parameters:
            if p.grad is not None:
                p.data.add_(p.grad, alpha=-self.lr)

    def zero_grad(self) -> None:
        for p in self.parameters:
            if p.grad is not None:
                p.grad.detach_().zero_()


class MixedPrecision:
    """fastai's callback: it is stepped in the optimizer's place, and the optimizer itself after it."""

    def __init__(self, optimizer: PlainOptimizer) -> None:
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.skipped = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def step(self) -> None:
        self.skipped = False

    def finish(self) -> None:
        self.skipped = True
        self.scaler.step(self)  # type: ignore[arg-type]
        if not self.skipped:
            self.optimizer.step()
        self.scaler.update()
        self.optimizer.zero_grad()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.first.bias.requires_grad_(False)  # frozen
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        large = torch.relu(self.first(x)) * self.gain
        return self.last(large / self.gain)


def train(bad_step: int | None) -> Any:
    seed_everything()
    model = Net()
    precision = MixedPrecision(PlainOptimizer(list(model.parameters()), 0.1))
    skipped = []
    for step in range(STEPS):
        model.gain = 1e6 if step == bad_step else 1.0
        x, y = torch.rand(5, 6) + 1.0, torch.randint(3, (5,))
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        precision.scaler.scale(loss).backward()
        precision.finish()
        skipped.append(precision.skipped)
    return skipped, fingerprint(model, precision.scaler)


def test_its_steps_are_no_skipped_ones(guard: Guard) -> None:
    """Each was taken for skipped, and looked at until nothing was left for what really failed."""
    run = guard(lambda: train(None))
    assert run.faults == 0
    assert run.result == train(None)
    assert run.report.steps == STEPS
    assert run.causes == []
    assert [v.skipped for v in run.session._dynamics.trajectory.recent][-5:] == [False] * 5


def test_a_failure_after_many_steps(guard: Guard) -> None:
    run = guard(lambda: train(BAD_STEP))
    assert run.faults == 0
    assert run.result == train(BAD_STEP)
    assert run.result[0].count(True) == 1
    assert (run.first.cause, run.first.step, run.first.module) == ("fp16-overflow", BAD_STEP, "")
    assert any(fix.verified for fix in run.first.fixes)


def test_a_function_in_the_place_of_the_scaler(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that lets a framework's `torch.amp.GradScaler()` make one for another device switched the guard off."""
    kind = torch.amp.GradScaler

    def body() -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(torch.amp, "GradScaler", lambda *_: kind("cpu", init_scale=1024.0))
            seed_everything()
            model = nn.Linear(4, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler()
            for _ in range(4):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = model(torch.rand(3, 4)).float().pow(2).mean()
                scaler.scale(loss).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        return fingerprint(model, optimizer)

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.causes == ["clip-before-unscale"]
