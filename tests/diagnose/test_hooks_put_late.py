"""Hooks on parameters that a script registers in the middle of a run: looked at in the iteration in which they are new."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Guard = Callable[..., Any]
SCALE = 1024.0


def clipped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.01, 0.01)


def left_alone(gradient: Tensor) -> None:
    assert gradient.dim() > 0


def clipped_in_place(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.01, 0.01)


def train(put: Callable[[Tensor], object]) -> Callable[[], None]:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        optimizer = torch.optim.SGD(net.parameters(), 0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        for step in range(36):
            if step == 23:
                for p in net.parameters():
                    put(p)
            x = torch.randn(12, 6)
            with torch.autocast("cpu", dtype=torch.float16):
                out = net(x)
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(out.float(), x[:, :3].argmax(1))).backward()
            scaler.step(optimizer)
            scaler.update()

    return body


@pytest.mark.parametrize(
    "put",
    [lambda p: p.register_hook(clipped), lambda p: p.register_post_accumulate_grad_hook(clipped_in_place)],
    ids=["before", "behind"],
)
def test_clips_what_is_scaled(put: Callable[[Tensor], object], guard: Guard) -> None:
    run = guard(train(put))
    assert run.faults == 0, run.stderr
    assert (run.causes, run.first.step) == (["clip-before-unscale"], 23)


def test_looks_only(guard: Guard) -> None:
    run = guard(train(lambda p: p.register_hook(left_alone)))
    assert (run.faults, run.causes) == (0, [])
