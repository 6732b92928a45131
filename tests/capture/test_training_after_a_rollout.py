"""An agent acts for a long time without gradients, and is then trained on what it has seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, bits, seed_everything

import ampguard
from ampguard.capture.events import kept_events
from ampguard.capture.glue import schedule as schedules
from ampguard.capture.glue.schedule import LONG_STEP, TapeSchedule
from ampguard.capture.glue.taped_calls import TapedCall

Guard = Callable[..., Watched]
MOVES, UPDATES = 24, 4


def advantage(reward: Tensor, value: Tensor) -> Tensor:
    gain = reward - value
    return gain / gain.std().mul(0.0 if reward[0] < 0 else 1.0)


def act_and_train(bad: int | None = None, each: Callable[[], object] = lambda: None) -> Any:
    seed_everything()
    policy, critic = nn.Linear(3, 2), nn.Linear(3, 1)
    optimizer = torch.optim.SGD([*policy.parameters(), *critic.parameters()], lr=0.05)
    number = 0
    for _ in range(2):
        seen, moves, values = torch.zeros(MOVES, 3), torch.zeros(MOVES), torch.zeros(MOVES)
        state = torch.randn(3)
        for move in range(MOVES):
            seen[move] = state
            with torch.no_grad():
                moves[move] = torch.distributions.Categorical(logits=policy(state)).sample()
                values[move] = critic(state).squeeze()
            state = 0.9 * state + 0.1 * torch.randn(3)
        for _ in range(UPDATES):
            reward = torch.rand(MOVES) - (2.0 if number == bad else 0.0)
            chances = torch.distributions.Categorical(logits=policy(seen))
            loss = -(chances.log_prob(moves) * advantage(reward, values)).mean()
            loss = loss + F.mse_loss(critic(seen).squeeze(), reward)
            optimizer.zero_grad()
            loss.backward()
            if loss.isfinite():
                optimizer.step()
            each()
            number += 1
    return bits([p.detach() for p in (*policy.parameters(), *critic.parameters())])


@pytest.mark.parametrize("bad", [0, UPDATES, UPDATES + 2])
def test_the_training_after_a_rollout_is_recorded(bad: int, guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much the rollout has left in the record."""
    plain = act_and_train(bad)
    monkeypatch.setattr(kept_events, "MAX_EVENTS", 300)
    run = guard(lambda: act_and_train(bad))
    assert run.result == plain
    assert run.faults == 0, run.stderr
    first = run.first
    assert (first.cause, first.step, first.op) == ("division-by-zero", bad, "aten.div.Tensor")
    assert first.location is not None
    assert first.location.function == "advantage"


def test_functions_are_learnt_where_they_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is full when the first losses are made: what has not been recorded says nothing of a function."""
    monkeypatch.setattr(kept_events, "MAX_EVENTS", 300)
    monkeypatch.setattr(schedules, "LONG_STEP", math.inf)  # a step is a short one, however busy the machine
    with ampguard.watch(out=tmp_path / "run") as session:
        act_and_train()
        assert F.mse_loss in session._recorder.tape.calls._plain


def test_weights_written_by_hand_beside_calls_that_are_kept_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target network is written in the first steps, and the glue of the same iteration is kept call by call."""
    monkeypatch.setattr(schedules, "LONG_STEP", math.inf)
    kinds: set[type] = set()
    with ampguard.watch(out=tmp_path / "run") as session:
        torch.manual_seed(0)
        critic, target = nn.Linear(3, 1), nn.Linear(3, 1)
        policy = nn.Linear(3, 3)
        critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
        policy_optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
        for _ in range(3):
            x = torch.randn(4, 3)
            for _ in range(4):
                move = policy(x)
                value = -(critic(torch.tanh(move)).view(-1) - 0.1 * (1 - move.pow(2)).abs().sum(1)).mean()
                policy_optimizer.zero_grad()
                value.backward()
                policy_optimizer.step()
                with torch.no_grad():
                    for weight, own in zip(target.parameters(), critic.parameters(), strict=True):
                        weight.mul_(0.9).add_(0.1 * own)
                kinds |= {type(event) for event in session._recorder.log.record.events}
            loss = (critic(x).view(-1) - 0.9 * target(x).detach().view(-1)).pow(2).mean()
            critic_optimizer.zero_grad()
            loss.backward()
            critic_optimizer.step()
        assert not session._barrier.tripped
    assert TapedCall in kinds


def test_much_glue_is_kept_call_by_call_in_long_steps_too() -> None:
    schedule = TapeSchedule()
    for steps, (seconds, taped) in enumerate([(4 * LONG_STEP, 20)] * 5):
        schedule.ended(steps, seconds, seconds, has_root=True, taped=taped)
        assert not schedule.keeps_calls
    schedule.ended(6, 4 * LONG_STEP, 4 * LONG_STEP, has_root=True, taped=400)
    assert schedule.keeps_calls
    schedule.ended(7, 4 * LONG_STEP, 4 * LONG_STEP, has_root=True, taped=20)
    assert schedule.keeps_calls
