"""Weights that the script moves by sums of scaled gradients itself; updates in which the scale cancels are right."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Guard = Callable[..., Any]
State = dict[int, Any]
Update = Callable[[int, Tensor, Tensor, State, int], None]
SCALE = 4096.0


def updated(update: Update, asks: bool = False) -> Callable[[], None]:
    """Beside an optimizer that holds the weights and is used for its `zero_grad` alone."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        state: State = {}
        for step in range(1, 11):
            optimizer.zero_grad()
            x = torch.randn(16, 8)
            with torch.autocast("cpu", dtype=torch.float16):
                out = net(x)
            scaler.scale(F.cross_entropy(out.float(), (x[:, 0] > 0).long())).backward()
            inverse = 1.0 / scaler.get_scale() if asks else 1.0
            with torch.no_grad():
                for number, p in enumerate(net.parameters()):
                    assert p.grad is not None
                    update(number, p, p.grad * inverse if asks else p.grad, state, step)

    return body


def heavy_ball(number: int, p: Tensor, g: Tensor, state: State, step: int) -> None:
    buffer = state.setdefault(number, torch.zeros_like(p))
    buffer.mul_(0.9).add_(g)
    p.add_(buffer, alpha=-1e-6)


def averaged(number: int, p: Tensor, g: Tensor, state: State, step: int) -> None:
    state[number] = state.get(number, torch.zeros_like(p)) * 0.9 + g * 0.1
    p.data -= 1e-6 * state[number]


@pytest.mark.parametrize("update", [heavy_ball, averaged])
def test_a_sum_of_scaled_gradients_moves_weights(guard: Guard, update: Update) -> None:
    run = guard(updated(update))
    assert run.faults == 0, run.stderr
    assert run.causes == ["bypassed-scaler"]
    assert (run.first.step, run.first.evidence["factor"], run.first.severity) == (0, SCALE, "error")
    assert run.first.location.function == update.__name__
    assert "by something made of gradients that are still scaled" in run.first.explanation


@pytest.mark.parametrize("update", [heavy_ball, averaged])
def test_a_sum_of_true_gradients(guard: Guard, update: Update) -> None:
    run = guard(updated(update, asks=True))
    assert run.faults == 0, run.stderr
    assert run.causes == []


def adamw(number: int, p: Tensor, g: Tensor, state: State, step: int) -> None:
    rate = 1e-3 * 0.5 * (1 + math.cos(step / 10 * math.pi))
    mean, square = state.setdefault(number, (torch.zeros_like(p), torch.zeros_like(p)))
    p.mul_(1 - rate * 0.01)
    mean.lerp_(g, 1 - 0.9)
    square.mul_(0.999).addcmul_(g, g, value=1 - 0.999)
    divisor = (square.sqrt() / math.sqrt(1 - 0.999**step)).add_(1e-8)
    p.addcdiv_(mean, divisor, value=-rate / (1 - 0.9**step))


def adam_anew(number: int, p: Tensor, g: Tensor, state: State, step: int) -> None:
    mean, square = state.get(number, (torch.zeros_like(p), torch.zeros_like(p)))
    state[number] = mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g**2
    p -= 1e-3 * (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)


def adagrad(number: int, p: Tensor, g: Tensor, state: State, step: int) -> None:
    square = state.setdefault(number, torch.zeros_like(p))
    square.addcmul_(g, g)
    p.addcdiv_(g, square.sqrt().add_(1e-10), value=-0.01)


def lamb(number: int, p: Tensor, g: Tensor, state: State, step: int) -> None:
    mean, square = state.setdefault(number, (torch.zeros_like(p), torch.zeros_like(p)))
    mean.mul_(0.9).add_(g, alpha=0.1)
    square.mul_(0.99).addcmul_(g, g, value=0.01)
    update = mean / square.sqrt().add(1e-6) + 0.01 * p
    p.add_(update, alpha=-float(0.01 * p.norm() / update.norm()))


def normalised(number: int, p: Tensor, g: Tensor, state: State, step: int) -> None:
    buffer = state.setdefault(number, torch.zeros_like(p))
    buffer.mul_(0.9).add_(g)
    p.add_(buffer / (buffer.norm() + 1e-8), alpha=-1e-3)


def signs(number: int, p: Tensor, g: Tensor, state: State, step: int) -> None:
    buffer = state.setdefault(number, torch.zeros_like(p))
    buffer.mul_(0.9).add_(g)
    p.sub_(1e-3 * buffer.sign())


def rate_over_scale(number: int, p: Tensor, g: Tensor, state: State, step: int) -> None:
    buffer = state.setdefault(number, torch.zeros_like(p))
    buffer.mul_(0.9).add_(g)
    p.add_(buffer, alpha=-1e-2 / 4096)


def over_written_scale(number: int, p: Tensor, g: Tensor, state: State, step: int) -> None:
    buffer = state.setdefault(number, torch.zeros_like(p))
    buffer.mul_(0.9).add_(g / 4096.0)
    p.add_(buffer, alpha=-1e-2)


@pytest.mark.parametrize(
    "update", [adamw, adam_anew, adagrad, lamb, normalised, signs, rate_over_scale, over_written_scale]
)
def test_an_update_in_which_the_scale_cancels(guard: Guard, update: Update) -> None:
    run = guard(updated(update))
    assert run.faults == 0, run.stderr
    assert run.causes == []
