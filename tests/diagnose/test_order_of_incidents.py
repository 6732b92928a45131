"""Which incident answers "why did my run break?"."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812


def test_what_pytorch_refused_comes_before_what_led_to_it(guard: Callable[..., Any]) -> None:
    """A batch whose gradients overflow is left out with `continue`, past update: the next unscale_ raises."""

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(8):
            x = torch.randn(8, 4) * (3e4 if step == 4 else 1.0)
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(x)
            optimizer.zero_grad()
            scaler.scale(F.mse_loss(out.float(), torch.zeros(8, 2))).backward()
            scaler.unscale_(optimizer)
            if not nn.utils.clip_grad_norm_(model.parameters(), 1e3).isfinite():
                continue
            scaler.step(optimizer)
            scaler.update()

    def script() -> None:
        with contextlib.suppress(RuntimeError):
            body()

    first, second = [i for i in guard(script).report.incidents if i.severity == "error"]
    assert (first.cause, first.step) == ("missing-update", 4)
    assert (second.phase, second.step) != ("protocol", 4)


def test_training_comes_before_the_rollout_that_failed_alike(guard: Callable[..., Any]) -> None:
    """An agent acts, and is trained on what it did: both saturate in the same step, and acting comes first in time."""

    class Squashed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            action = torch.tanh(self.mean(x))
            return action, torch.log(1 - action.square()).sum(-1)

    def body() -> None:
        torch.manual_seed(0)
        policy, critic = Squashed(), nn.Linear(4, 2)
        optimizer = torch.optim.SGD([*policy.parameters(), *critic.parameters()], lr=1e-2)
        for step in range(6):
            state = torch.randn(8, 4) * (1e3 if step == 4 else 1.0)
            with torch.no_grad():
                policy(state)
            optimizer.zero_grad()
            critic(state / state.norm()).square().mean().backward()
            loss = -0.01 * policy(state)[1].mean()
            if not loss.isfinite():
                break
            loss.backward()
            optimizer.step()

    first, *others = guard(body).report.incidents
    assert (first.cause, first.mode, first.step) == ("domain-error", "train", 4)
    assert [(i.cause, i.mode) for i in others] == [("domain-error", "eval")]
