"""The incidents of a run: what is new, what is known, what is a consequence, and when enough is enough."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from watching import Watched, seed_everything

from ampguard.replay.rebuild import Replayer

Guard = Callable[..., Watched]
SOURCES = Path(__file__).parents[2] / "src"


class Fragile(nn.Module):
    """Fails on a line of its own for each number from 0 to 3; healthy otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor, how: int | None = None) -> Tensor:
        h = self.layer(x)
        if how == 0:
            return torch.log(h.detach() * 0) + h
        if how == 1:
            return torch.sqrt(h.detach() * 0 - 1) + h
        if how == 2:
            return torch.acos(h.detach() * 0 + 2) + h
        if how == 3:
            return (h.detach() - h.detach()) / 0.0 * h
        return h


def fails(*hows: int | None, update: bool = False) -> Callable[[], int]:
    def body() -> int:
        seed_everything()
        model = Fragile()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        done = 0
        for how in hows:
            loss = model(torch.randn(3, 2), how).mean()
            loss.backward()
            if update or how is None:
                optimizer.step()
            else:
                for p in model.parameters():
                    p.grad = torch.zeros_like(p)
                optimizer.step()
            optimizer.zero_grad()
            done += 1
        return done

    return body


def test_same_place_is_one_incident_that_is_counted(guard: Guard) -> None:
    run = guard(fails(None, 0, None, 0, 0))
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step, incident.occurrences) == ("domain-error", 1, 3)
    assert incident.evidence["last_step"] == 4
    assert run.stderr.count("error[") == 1


def test_other_place_is_another_incident(guard: Guard) -> None:
    run = guard(fails(0, 1, 2))
    assert [i.op for i in run.report.incidents] == ["aten.log.default", "aten.sqrt.default", "aten.acos.default"]
    assert [i.step for i in run.report.incidents] == [0, 1, 2]


def test_what_follows_a_poisoned_update_is_its_consequence(guard: Guard) -> None:
    run = guard(fails(None, 3, None, None, 1, update=True))
    (incident,) = run.report.incidents
    assert (incident.step, incident.cause) == (1, "division-by-zero")
    assert incident.evidence["later_failures_caused_by_it"] == 3
    assert incident.occurrences == 1


def test_no_more_than_max_incidents_are_investigated(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    replays = []
    run_original = Replayer.run
    monkeypatch.setattr(Replayer, "run", lambda *a, **k: replays.append(1) or run_original(*a, **k))

    run = guard(fails(0, 1, 2, 3, 0, 1), max_incidents=2)

    assert len(run.report.incidents) == 2
    assert run.session._casebook.is_used_up
    before = len(replays)
    assert before > 0
    assert run.result == 6
    assert sum(i.occurrences for i in run.report.incidents) == 6, "later failures of the same modules are counted"


def test_max_incidents_of_zero_only_counts(guard: Guard) -> None:
    run = guard(fails(0, 1), max_incidents=0)
    assert run.faults == 0
    assert run.result == 2
    assert run.report.incidents == ()


def test_run_that_fails_in_every_step_stops_looking(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    examined = []
    original = Replayer.__init__
    monkeypatch.setattr(Replayer, "__init__", lambda *a, **k: examined.append(1) or original(*a, **k))
    run = guard(fails(*[0] * 60), max_incidents=2)
    assert run.result == 60
    assert run.first.occurrences == 60
    assert len(examined) <= 8


def test_stop_ends_the_block_at_the_first_error_after_its_card(guard: Guard) -> None:
    done = []

    def body() -> None:
        seed_everything()
        model = Fragile()
        for step in range(10):
            model(torch.randn(3, 2), 0 if step == 4 else None).mean().backward()
            done.append(step)

    run = guard(body, on_nonfinite="stop")
    assert done == [0, 1, 2, 3]
    assert run.causes == ["domain-error"]
    assert "error[domain-error]" in run.stderr
    assert nn.Module.__call__.__module__.startswith("torch")


SCRIPT = """
import sys, torch
from torch import nn
model = nn.Linear(2, 1)
try:
    for step in range(6):
        loss = model(torch.ones(3, 2)).mean() * (0.0 if step == 2 else 1.0)
        torch.log(loss * loss).backward()
except Exception as error:
    print("swallowed", error)
finally:
    print("cleaned up at", step)
sys.exit(7)
"""


@pytest.mark.parametrize(("policy", "status", "at"), [("stop", 3, 2), ("observe", 7, 5)])
def test_exit_status(policy: str, status: int, at: int, tmp_path: Path) -> None:
    """`stop` is no Exception that a training loop could swallow; `observe` leaves the script's own status."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "ampguard",
        "run",
        "--on-nonfinite",
        policy,
        "--out",
        str(tmp_path / "run"),
        str(script),
    ]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == status, done.stderr
    assert done.stdout == f"cleaned up at {at}\n"
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [i["cause"] for i in report["incidents"]] == ["domain-error"]
    assert report["status"] == "incidents"
