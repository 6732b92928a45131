"""Batches that are computed in an iteration before their own: a prefetcher's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, bits, seed_everything

import ampguard
from ampguard.capture.events.log import EventLog

Guard = Callable[..., Watched]
STEPS, BAD = 16, 11


def recordings() -> Iterator[Tensor]:
    for number in range(STEPS):
        wave = torch.randn(8, 32)
        if number == BAD:
            wave[3] = 0.25  # a microphone that was off
        yield wave


def standardised(wave: Tensor) -> Tensor:
    wave = wave - wave.mean(1, keepdim=True)
    return wave / wave.std(1, keepdim=True)


def train(ahead: int, place: str, fills_first: bool = False) -> Any:
    seed_everything()
    source = recordings()
    waiting = [standardised(next(source)) for _ in range(ahead)] if fills_first else []
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    waiting = waiting or [standardised(next(source)) for _ in range(ahead)]
    mean, losses = torch.zeros(()), []

    def load() -> None:
        nonlocal mean
        if (wave := next(source, None)) is not None:
            waiting.append(standardised(wave))
            mean = 0.9 * mean + 0.1 * waiting[-1].max()  # each of these hangs on the one before

    while waiting:
        loss = F.cross_entropy(model(waiting.pop(0)), torch.randint(0, 3, (8,)))
        if place == "before backward":
            load()
        optimizer.zero_grad()
        loss.backward()
        if place == "after backward":
            load()
        if torch.isfinite(loss):
            optimizer.step()
        losses.append(loss.item())
        if place == "after the step":
            load()
    assert len(losses) == STEPS
    return bits([p.detach() for p in model.parameters()])


@pytest.mark.parametrize("place", ["before backward", "after backward", "after the step"])
@pytest.mark.parametrize(("ahead", "fills_first"), [(1, False), (2, False), (2, True), (4, False), (4, True)])
def test_the_line_that_prepared_a_batch_is_named(ahead: int, fills_first: bool, place: str, guard: Guard) -> None:
    plain = train(ahead, place, fills_first)
    run = guard(lambda: train(ahead, place, fills_first))
    assert run.result == plain
    assert run.faults == 0
    first = run.first
    assert (first.cause, first.step, first.op, first.module) == ("division-by-zero", BAD, "aten.div.Tensor", None)
    assert first.location is not None
    assert first.location.code == "return wave / wave.std(1, keepdim=True)"
    assert first.fixes[0].verified


def test_what_is_kept_of_earlier_steps_does_not_grow(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    ended = EventLog.iteration_ended

    def iteration_ended(log: EventLog, is_all: bool = True) -> None:
        ended(log, is_all)
        sizes.append(log.size)

    monkeypatch.setattr(EventLog, "iteration_ended", iteration_ended)
    assert guard(lambda: train(2, "before backward")).faults == 0
    assert max(sizes[8:]) < 1.5 * max(sizes[:8])  # a step takes some ten events


def test_a_batch_that_two_optimizers_use_is_not_prepared_ahead(tmp_path: Path) -> None:
    """The second one's loss may count as the next iteration's, as long as it is not known how they take turns."""
    with ampguard.watch(out=tmp_path / "run") as session:
        critic, policy = nn.Linear(3, 1), nn.Linear(3, 3)
        first = torch.optim.SGD(critic.parameters(), lr=0.1)
        second = torch.optim.SGD(policy.parameters(), lr=0.1)
        for step in range(8):
            x = torch.rand(4, 3).add(1.0).log()
            loss = critic(x).pow(2).mean()
            first.zero_grad()
            loss.backward()
            first.step()
            if step % 2:
                loss = -critic(policy(x)).mean()
                second.zero_grad()
                loss.backward()
                second.step()
        assert not session._recorder.log.ahead.is_usual
        assert not session._recorder.log.ahead.kept
        assert not session._barrier.tripped
