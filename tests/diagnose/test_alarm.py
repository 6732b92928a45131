"""When steps are worth keeping: numbers that leave their range, and those that only vary."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from ampguard.diagnose.dynamics.alarm import Alarm

NOISE = random.Random(5)


def first_alarm(losses: Sequence[float], rates: Sequence[float] = ()) -> int | None:
    alarm = Alarm()
    for step, loss in enumerate(losses):
        rate = rates[step] if rates else 0.1
        if not alarm.is_quiet(loss, rate):
            assert alarm.reason(loss, rate)
            return step
        alarm.calm(loss, rate)
    return None


FALLING = [5.0 * 0.98**i * math.exp(NOISE.gauss(0, 0.1)) for i in range(300)]
SPIKY = [abs(NOISE.gauss(0, 1)) + 0.5 for _ in range(2000)]
SIGNED = [NOISE.gauss(0, 1) - 3 for _ in range(500)]
WARM_UP = [min(1.0, (i + 1) / 50) for i in range(300)]
COSINE = [0.5 + 0.5 * math.cos(math.pi * (i % 100) / 100) for i in range(300)]


@pytest.mark.parametrize(
    ("losses", "rates"),
    [
        (FALLING, ()),
        (SPIKY, ()),
        (SIGNED, ()),
        (FALLING, WARM_UP),
        (FALLING, COSINE),
        ([0.0] * 50, ()),
        ([2.3, 4.1, 3.0, 5.0, 2.9, 2.0, 1.8, 1.5, 1.4, 1.2], ()),
        ([2.0, math.nan, math.inf, 2.0, 1.9], ()),
    ],
    ids=["falling", "noisy", "signed", "warm-up", "restarts", "zero", "a bad start", "not finite"],
)
def test_what_varies_raises_no_alarm(losses: list[float], rates: list[float]) -> None:
    assert first_alarm(losses, rates) is None


@pytest.mark.parametrize("growth", [1.05, 1.3, 2.0, 16.0])
def test_a_rise_is_noticed_however_slow(growth: float) -> None:
    losses = FALLING[:100] + [FALLING[99] * growth**i for i in range(200)]
    found = first_alarm(losses)
    assert found is not None
    assert found >= 100
    assert losses[found] < 50 * max(losses[20:100])


@pytest.mark.parametrize("growth", [2.0, 5.0, 100.0])
def test_a_rise_from_the_first_step_on_is_noticed(growth: float) -> None:
    found = first_alarm([growth**i for i in range(60)])
    assert found is not None
    assert found <= 24


def test_a_raised_rate_is_noticed_before_it_is_used() -> None:
    assert first_alarm(FALLING, [0.1] * 30 + [20.0] * 270) == 30
    assert first_alarm(FALLING, [0.1] * 30 + [0.2] * 270) is None
    assert first_alarm(FALLING, [0.0] * 3 + [0.1] * 297) is None


def test_a_new_level_becomes_the_usual() -> None:
    alarm = Alarm()
    for loss in [1.0] * 50:
        alarm.calm(loss, 0.1)
    assert not alarm.is_quiet(60.0, 0.1)
    alarm.settle()
    for loss in [60.0] * 20:
        assert alarm.is_quiet(loss, 0.1)
        alarm.calm(loss, 0.1)
    assert not alarm.is_quiet(600.0, 0.1)
