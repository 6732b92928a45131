"""What begins outside every module in the middle of an iteration: the second optimizer's loss, the next part of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

Guard = Callable[..., Any]
BAD = 6


def train(scaler: GradScaler | None) -> None:
    """A generator that is to match the second moments of the data, which outgrow float16."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 16), nn.Linear(16, 1)
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-4) for net in (critic, generator)]

    def learn(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)

    for step in range(9):
        data = torch.randn(8, 16) * (300.0 if step == BAD else 1.0)
        with torch.autocast("cpu", torch.float16):
            made = generator(torch.randn(8, 4))
            loss = critic(made.detach()).mean() - critic(data).mean().clamp(max=10.0)
        learn(loss, optimizers[0])
        moments = (made.pow(2).mean(0) - data.half().pow(2).mean(0)).abs().mean()
        with torch.autocast("cpu", torch.float16):
            loss = 0.01 * moments - critic(made).mean()
        learn(loss, optimizers[1])
        if scaler is not None:
            scaler.update()


@pytest.mark.parametrize("scales", [True, False])
def test_the_operator_of_the_second_loss_is_named(scales: bool, guard: Guard) -> None:
    run = guard(lambda: train(GradScaler("cpu", init_scale=256.0) if scales else None))
    assert (run.first.cause, run.first.step) == ("fp16-overflow", BAD)
    assert run.first.op == "aten.pow.Tensor_Scalar"
    assert "moments =" in run.first.location.code
    assert any(fix.verified for fix in run.first.fixes)


def act(clears: str, steps: int = 20, bad: int = 17) -> None:
    """An actor whose advantages are standardised after the critic's step; one episode is over at once."""
    torch.manual_seed(0)
    actor, critic = nn.Linear(4, 2), nn.Linear(4, 1)
    for_actor, for_critic = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (actor, critic))
    scaler = GradScaler("cpu", init_scale=256.0)
    for step in range(steps):
        if clears == "first":
            for_critic.zero_grad()
        states, returns = torch.randn(1 if step == bad else 9, 4), torch.rand(9)[: 1 if step == bad else 9]
        with torch.autocast("cpu", torch.float16):
            values = critic(states).squeeze(-1)
        scaler.scale(nn.functional.mse_loss(values.float(), returns)).backward()
        scaler.step(for_critic)
        advantages = returns - values.detach().float()
        advantages = advantages / (advantages.var() + 1e-8)
        with torch.autocast("cpu", torch.float16):
            chosen = actor(states).float().log_softmax(-1)[:, 0]
        loss = -(chosen * advantages).mean()
        for_actor.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(for_actor)
        scaler.update()
        if clears == "last":
            for_critic.zero_grad()


@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.parametrize("clears", ["first", "last"])
def test_what_is_computed_after_an_optimizers_step_is_seen_wherever_gradients_are_cleared(
    clears: str, guard: Guard
) -> None:
    run = guard(lambda: act(clears))
    assert (run.first.cause, run.first.step) == ("empty-reduction", 17)
    assert "advantages.var()" in run.first.location.code


def accumulate() -> None:
    """Parts of a batch, each prepared by the script itself; one pixel of the third part of step 4 is below 0."""
    torch.manual_seed(0)
    net = nn.Linear(12, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for step in range(6):
        optimizer.zero_grad()
        for part in range(4):
            pixels = torch.rand(8, 12)
            if (step, part) == (4, 2):
                pixels[3, 5] = -1e-4
            corrected = pixels.pow(0.45)
            loss = nn.functional.cross_entropy(net(corrected), torch.randint(0, 3, (8,))) / 4
            loss.backward()
        optimizer.step()


def test_what_prepares_a_later_part_of_an_accumulated_batch_is_seen(guard: Guard) -> None:
    run = guard(accumulate)
    assert (run.first.cause, run.first.step, run.first.phase) == ("domain-error", 4, "data")
    assert "corrected =" in run.first.location.code
    assert any(fix.verified for fix in run.first.fixes)
