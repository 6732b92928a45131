"""An EM step, a clustering: hundreds of operators before any module of the iteration, one of which makes the NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampguard.capture.glue import schedule
from ampguard.capture.glue.schedule import PREFIX_OPS, TapeSchedule

Guard = Callable[..., Any]
BAD = 9


def fitted(points: Tensor, rounds: int = 15) -> Tensor:
    """Responsibilities of two clusters."""
    means, spread = torch.randn(2, 3), torch.ones(2)
    shares = torch.ones(len(points), 2)
    for _ in range(rounds):
        apart = (points[:, None] - means).square().sum(-1)
        shares = torch.softmax(-apart / (2 * spread), 1)
        means = (shares.T @ points) / shares.sum(0)[:, None]
        spread = (shares * apart).sum(0) / shares.sum(0)
    return shares


def train(every: int, steps: int = 12) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shares = torch.full((16, 2), 0.5)
    for step in range(steps):
        x = torch.randn(16, 3) if step != BAD else torch.zeros(16, 3)
        if step % every == 0:
            shares = fitted(x)
        loss = -(shares * model(x).log_softmax(1)).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("every", [1, 3])
def test_the_line_in_it(every: int, guard: Guard) -> None:
    run = guard(lambda: train(every))
    assert run.faults == 0, run.stderr
    incident = run.first
    assert (incident.cause, incident.step, incident.op) == ("division-by-zero", BAD, "aten.div.Tensor"), run.stderr
    assert incident.location is not None
    assert incident.location.code == "shares = torch.softmax(-apart / (2 * spread), 1)"
    assert any(fix.verified for fix in incident.fixes)


def test_what_it_may_take_is_bounded(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once nothing more is free, such a step is not taped any more, and the failure is that of what was given."""
    monkeypatch.setattr(schedule, "FREE_SECONDS", 0.0)
    monkeypatch.setattr(schedule, "GLUE_TIME_SHARE", 0.0)
    run = guard(lambda: train(1))
    assert run.faults == 0, run.stderr
    assert run.first.cause == "nonfinite-input"


def test_a_schedule_whose_time_is_spent() -> None:
    tape = TapeSchedule()
    assert tape.more_before() > 1000
    assert tape.more_before() == 0, "once a step"
    for step in range(3, 400):
        tape.begins(events=1)
        tape.prefix_was(used=True)
        tape.ended(step, 1e-3, 1e-3, True, 1000)
    assert tape.prefix_limit == 0
    for step in range(400, 420):
        tape.ended(step, 100.0, 100.0, True, 0)
    assert tape.prefix_limit == PREFIX_OPS, "it is taped again when there is time"


def test_what_is_charged_is_that_of_one_iteration(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of iterations before may be there still: they were charged then."""
    charged: list[int] = []
    ended = TapeSchedule.ended

    def noting(self: TapeSchedule, steps: int, seconds: float, usual: float, has_root: bool, taped: int) -> None:
        charged.append(taped)
        ended(self, steps, seconds, usual, has_root, taped)

    monkeypatch.setattr(TapeSchedule, "ended", noting)
    run = guard(lambda: train(1, steps=BAD))
    assert run.faults == 0, run.stderr
    assert max(charged) <= charged[1] + 4, charged
