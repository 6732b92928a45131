"""Scripts that ask whether numbers are finite, and compute them again where they are not: outside autocast, say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
AT = 4


class Scaled(nn.Module):
    """Its first layer leaves float16's range for large inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        nn.init.uniform_(self.first.weight, 0.5, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.first(x)))


def forward(model: nn.Module, x: Tensor, asks: bool, again_in: torch.dtype) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    if not asks or not torch.isfinite(out).all():
        with torch.autocast("cpu", dtype=again_in, enabled=again_in is not torch.float32):
            out = model(x)
    return out.float()


def train(evaluates: bool, asks: bool = True, again_in: torch.dtype = torch.float32) -> None:
    torch.manual_seed(0)
    model = Scaled()
    opt = torch.optim.SGD(model.parameters(), 1e-3)
    for it in range(8):
        x, labels = torch.rand(8, 6) * (4e4 if it == AT else 1.0), torch.randint(3, (8,))
        if evaluates:
            model.eval()
            with torch.no_grad():
                forward(model, x, asks, again_in)
            model.train()
            x = torch.rand(8, 6)
        opt.zero_grad()
        loss = nn.functional.cross_entropy(forward(model, x, asks, again_in), labels)
        if not torch.isfinite(loss):
            continue
        loss.backward()
        opt.step()


@pytest.mark.parametrize("evaluates", [False, True])
def test_computed_again_in_float32(evaluates: bool, guard: Guard) -> None:
    run = guard(lambda: train(evaluates))
    told = [(i.cause, i.severity, i.step, i.mode) for i in run.report.incidents]
    assert run.faults == 0
    assert told == ([("fp16-overflow", "info", AT, "eval")] if evaluates else []), run.stderr
    if evaluates:
        assert "computed it again: that was finite" in run.first.explanation


def test_compared_without_a_question(guard: Guard) -> None:
    """A script that evaluates in two precisions is told of the one that fails."""
    run = guard(lambda: train(evaluates=True, asks=False))
    assert [(i.cause, i.severity, i.step) for i in run.report.incidents] == [("fp16-overflow", "error", AT)], run.stderr


@pytest.mark.parametrize("evaluates", [False, True])
def test_no_better_the_second_time(evaluates: bool, guard: Guard) -> None:
    run = guard(lambda: train(evaluates, again_in=torch.float16))
    assert run.first.severity != "info"
    assert (run.faults, run.first.cause, run.first.step) == (0, "fp16-overflow", AT), run.stderr


def test_loss_of_the_same_batch_once_more(guard: Guard) -> None:
    """The script lowers what overflows until the loss of the same batch is finite."""

    def body() -> None:
        torch.manual_seed(0)
        model, sharpness = nn.Linear(6, 4), 40.0
        opt = torch.optim.SGD(model.parameters(), 1e-3)
        for _ in range(6):
            x = torch.randn(8, 6)
            while True:
                with torch.autocast("cpu", dtype=torch.float16):
                    z = nn.functional.normalize(model(x).float(), dim=1)
                    energy = (sharpness * (z @ z.t())).exp()
                loss = energy.float().sum(1).log().mean()
                if not torch.isinf(energy).any() and not torch.isnan(loss):
                    break
                sharpness *= 0.6
            opt.zero_grad()
            loss.backward()
            opt.step()

    run = guard(body)
    assert run.faults == 0
    assert [(i.cause, i.severity, i.step) for i in run.report.incidents] == [("fp16-overflow", "info", 0)], run.stderr


def test_bad_gradients_of_the_second_loss_are_told(guard: Guard) -> None:
    """The loss that the script goes on with is finite, and its derivative is not."""

    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x: Tensor, gain: float) -> Tensor:
            energy = (gain * self.layer(x).abs().sum()).exp()
            if gain < 1.0:
                return energy.log() + (self.layer(x) - self.layer(x)).square().sum().sqrt()
            return energy.log()

    def body() -> None:
        torch.manual_seed(0)
        model = Spread()
        opt = torch.optim.SGD(model.parameters(), 1e-4)
        for it in range(6):
            x = torch.randn(8, 6)
            loss = model(x, 1e4 if it == AT else 1.0)
            if not torch.isfinite(loss):
                loss = model(x, 1e-3)
            opt.zero_grad()
            loss.backward()
            opt.step()

    run = guard(body)
    told = {(i.cause, i.severity) for i in run.report.incidents if i.step == AT}
    assert run.faults == 0
    assert ("overflow", "info") in told, run.stderr
    assert any(i.phase == "backward" and i.severity == "error" for i in run.report.incidents if i.step == AT), (
        run.stderr
    )
