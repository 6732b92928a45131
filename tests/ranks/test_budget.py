"""How long an investigation may keep the other ranks waiting."""

from __future__ import annotations

import time

import pytest

from ampguard import compat
from ampguard.diagnose.investigate import Budget


def seconds(step_seconds: float) -> float:
    now = time.perf_counter()
    return Budget.for_step(step_seconds, now).deadline - now


def test_alone_it_is_22_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "collective_timeout", lambda: None)
    assert seconds(60.0) == pytest.approx(1320.0)
    assert seconds(0.01) == pytest.approx(2.5)


def test_with_others_at_most_a_fifth_of_what_their_collectives_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "collective_timeout", lambda: 600.0)
    assert seconds(60.0) == pytest.approx(120.0)
    assert seconds(0.01) == pytest.approx(2.5)
