"""An agent acts thousands of times between updates: what that costs is bounded, and what it fills is replayed as it was."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import fingerprint, seed_everything

from ampguard.capture.events import forgetting, forgetting_log, log
from ampguard.capture.record import Event
from ampguard.capture.root_calls import pace
from ampguard.replay.activations import ActivationSampling

Guard = Callable[..., Any]
STEPS = 12


def rollout(actor: nn.Module, critic: nn.Module, stored: dict[str, Tensor]) -> None:
    for t in range(STEPS):
        x = torch.randn(4, 3)
        stored["seen"][t] = x
        with torch.no_grad():
            stored["value"][t] = critic(x).flatten()
            stored["act"][t] = actor(x).argmax(1).float()


def advantages(values: Tensor, gamma: float) -> Tensor:
    """Filled from the last row to the first, each from the one after it."""
    found, last = torch.zeros_like(values), torch.zeros(4)
    with torch.no_grad():
        for t in reversed(range(STEPS)):
            found[t] = last = 1.0 - values[t] + gamma * last
    return found


def train(iterations: int, gamma: Callable[[int], float], spoil: int | None = None) -> dict[str, Any]:
    seed_everything()
    actor, critic = nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], 1e-3)
    for i in range(iterations):
        stored = {"seen": torch.zeros(STEPS, 4, 3), "value": torch.zeros(STEPS, 4), "act": torch.zeros(STEPS, 4)}
        rollout(actor, critic, stored)
        if i == spoil:
            with torch.no_grad():
                critic(torch.full((2, 3), float("nan")))
        target = advantages(stored["value"], gamma(i)) + stored["value"]
        for _ in range(2):
            loss = (critic(stored["seen"].reshape(-1, 3)).flatten() - target.reshape(-1)).square().mean()
            loss = loss + actor(stored["seen"].reshape(-1, 3)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return fingerprint(actor, critic, optimizer)


def test_rows_written_one_by_one_are_replayed_as_they_were(guard: Guard) -> None:
    run = guard(lambda: train(3, lambda i: 1e30 if i == 2 else 0.9))
    assert run.faults == 0, run.stderr
    incident = run.first
    assert (incident.cause, incident.step, incident.op) == ("overflow", 4, "aten.mul.Tensor")
    assert incident.location is not None
    assert incident.location.code == "found[t] = last = 1.0 - values[t] + gamma * last"


def test_what_is_still_in_use_is_asked_seldom_when_it_is_much(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    still_used = forgetting.still_used

    def counted(events: list[Event], *others: Any) -> set[int]:
        sizes.append(len(events))
        return still_used(events, *others)

    monkeypatch.setattr(forgetting_log, "still_used", counted)
    run = guard(lambda: train(6, lambda i: 0.9))
    assert run.faults == 0, run.stderr
    per_iteration = sum(sizes) / 6
    assert per_iteration < 10 * max(sizes), "and not all of them at every call"


@pytest.mark.parametrize("rests", [False, True])
def test_an_agent_that_acts_is_only_looked_at_after_a_while(
    rests: bool, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rests:
        monkeypatch.setattr(pace, "FREE_SECONDS", 0.0)
        monkeypatch.setattr(pace, "SHARE", 0.0)
    monkeypatch.setattr(ActivationSampling, "is_due", lambda self, step: step == 2)  # on time or not
    kept: list[int] = []
    leave = pace.Pace.leave
    monkeypatch.setattr(pace.Pace, "leave", lambda self, *args: kept.append(1) or leave(self, *args))
    unguarded = train(3, lambda i: 0.9, spoil=1)
    run = guard(lambda: train(3, lambda i: 0.9, spoil=1))
    assert run.faults == 0, run.stderr
    assert run.result == unguarded
    # While they rest: the first, the first of a step whose activations are sampled, and the bad one; behind that, all.
    assert len(kept) == (3 + 2 * STEPS if rests else 2 * 3 * STEPS + 1)
    incident = run.first
    assert (incident.cause, incident.mode, incident.step) == ("nonfinite-input", "eval", 2)


def test_a_tensor_of_before_is_kept_as_each_reader_saw_it() -> None:
    """Written to again and again in place: earlier readers get the copy of their own version, and only these."""
    kept = log.EventLog()
    held = torch.zeros(3)
    add = torch.ops.aten.add.Tensor
    readers = []
    for value in range(3):
        readers += [kept.add_operator(add, (held, 1.0), {}, None, sys._getframe()) for _ in range(2)]
        copy = kept.copied(held)
        held.fill_(value + 1.0)
        assert float(copy.value[0]) == value
    assert [float(op.args[0].value[0]) for op in readers] == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]


def test_time_that_others_take_is_not_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is shared an evaluation is kept as far as on one that is not."""
    kept = pace.Pace()
    monkeypatch.setattr(pace.time, "thread_time", lambda: 1.0)
    kept.enter(5)
    kept.leave(5, seconds=0.0)
    assert kept.spent == 0.0


def test_what_an_evaluation_makes_of_a_call_is_charged_and_a_loss_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = pace.Pace()
    monkeypatch.setattr(pace.time, "thread_time", lambda: 1.0)
    kept.enter(5)
    kept.leave(6, seconds=0.0)
    kept.close(16)  # the next step's model is called
    assert kept.spent == pytest.approx(10 * pace.TAPED_OP_SECONDS)
    kept.enter(26)
    kept.leave(27, seconds=0.0)
    kept.is_open = False  # backward: this was a teacher's, and what follows it a loss
    kept.enter(99)
    assert kept.spent == pytest.approx(10 * pace.TAPED_OP_SECONDS)
