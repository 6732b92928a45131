"""The incidents of a run: what is new, what is known, what is a consequence, and when enough is enough."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from watching import Watched, seed_everything

import warm
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


class Normed(nn.Module):
    """The running statistics of its second input are poisoned before any loss is."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.out = nn.Linear(16, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = self.out(torch.relu(self.norm(self.two(b)) + self.one(a)))
        return out


def test_update_after_a_failure_that_showed_first_in_a_buffer_poisons(guard: Guard) -> None:
    def body() -> None:
        seed_everything()
        model, criterion = Normed(), nn.MSELoss()  # a module: the buffer is judged as it is called
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for step in range(5):
            a, b = torch.randn(8, 8), torch.randn(8, 8)
            if step == 1:
                b[3, 2] = -math.inf
            optimizer.zero_grad()
            criterion(model(a, b), torch.zeros(8, 4)).backward()
            optimizer.step()

    run = guard(body)
    assert [(i.cause, i.step, i.occurrences) for i in run.report.incidents] == [("nonfinite-input", 1, 1)]
    assert run.first.evidence["later_failures_caused_by_it"] == 3


def test_no_more_than_max_incidents_are_investigated(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    replays = []
    run_original = Replayer.run
    monkeypatch.setattr(Replayer, "run", lambda *a, **k: replays.append(1) or run_original(*a, **k))

    run = guard(fails(0, 1, 2, 3, 0, 1), max_incidents=2)

    assert len(run.report.incidents) == 2
    assert run.session._examiner.is_used_up
    before = len(replays)
    assert before > 0
    assert run.result == 6
    assert sum(i.occurrences for i in run.report.incidents) == 6, "later failures of the same modules are counted"


def test_max_incidents_of_zero_only_counts(guard: Guard) -> None:
    run = guard(fails(0, 1), max_incidents=0)
    assert run.faults == 0
    assert run.result == 2
    assert run.report.incidents == ()
    assert run.report.status == "incidents"
    assert "bad losses that were not looked into" in run.stderr


def test_max_incidents_of_zero_in_a_clean_run(guard: Guard) -> None:
    def body() -> None:
        seed_everything()
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)  # it settles: skipped steps are normal operation
        for _ in range(30):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(torch.randn(4, 4)).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    run = guard(body, max_incidents=0)
    assert run.report.status == "clean"
    assert "not looked into" not in run.stderr


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
    done = warm.run(command, env=environment, timeout=60)
    assert done.returncode == status, done.stderr
    assert done.stdout == f"cleaned up at {at}\n"
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [i["cause"] for i in report["incidents"]] == ["domain-error"]
    assert report["status"] == "incidents"


class TwoLosses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.layer(x)
        return {"loss_cls": h.exp().mean(), "loss_size": h.abs().log().mean()}


@pytest.mark.parametrize("reads", ["before", "after", "instead"])
def test_terms_that_the_script_reads_are_the_failure_of_their_sum(reads: str, guard: Guard) -> None:
    """A trainer that writes each loss of a dict to its log: two bad batches are two occurrences, not six."""

    def body() -> None:
        seed_everything()
        model = TwoLosses()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(8):
            losses = model(torch.full((2, 4), float("nan")) if step in (4, 6) else torch.randn(2, 4))
            total = losses["loss_cls"] + losses["loss_size"]
            is_bad = reads != "after" and any(math.isnan(v.item()) for v in losses.values())
            if is_bad and reads == "instead":
                continue
            optimizer.zero_grad()
            total.backward()
            if reads == "after":
                [v.item() for v in losses.values()]
            if step not in (4, 6):
                optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert [(i.cause, i.step, i.occurrences) for i in run.report.incidents] == [("nonfinite-input", 4, 2)]


def test_output_and_loss_of_an_evaluation_are_one_failure(guard: Guard) -> None:
    def body() -> None:
        seed_everything()
        model = nn.Linear(4, 3).eval()
        with torch.no_grad():
            for step in range(6):
                out = model(torch.full((2, 4), float("nan")) if step in (2, 4) else torch.randn(2, 4))
                (out - 1).pow(2).mean().item()

    run = guard(body)
    assert [(i.cause, i.occurrences) for i in run.report.incidents] == [("nonfinite-input", 2)]


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_float16_losses_times_the_scale_are_the_scaler_settling(reduction: str, guard: Guard) -> None:
    """Several losses stay float16 when they are scaled, and become one only then: their product with 65536 is Inf."""

    def body() -> float:
        seed_everything()
        model, scaler = nn.Linear(6, 1), torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(12):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(torch.randn(8, 6))
            losses = (out - 4).pow(2).mean(1)
            getattr(scaler.scale(losses), reduction)().backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    run = guard(body)
    assert run.result < 65536
    assert run.report.status == "clean"
    assert {(i.cause, i.severity) for i in run.report.incidents} == {("loss-scale-overflow", "info")}
    assert "compute the criterion in float32" in run.first.explanation


def test_steps_that_are_skipped_unseen_are_those_of_the_last_that_was_seen(
    guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A square root at 0 from step 10 on, in a run whose scaler has settled before: not the scale's doing."""
    monkeypatch.setattr("ampguard.diagnose.cases.skipped.FREE_LOOKS", 3)
    monkeypatch.setattr("ampguard.diagnose.cases.skipped.TIME_SHARE", 0.0)

    def body() -> None:
        seed_everything()
        model, scaler = nn.Linear(6, 1), torch.amp.GradScaler("cpu", init_scale=2.0**17)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(40):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(torch.randn(8, 6))
            distance = out.float() - (0 if step < 10 else out.detach().float())
            scaler.scale(distance.square().sum().sqrt()).backward()
            scaler.step(optimizer)
            scaler.update()

    run = guard(body, max_incidents=5)
    assert run.first.cause == "singular-gradient"
    assert run.first.occurrences == 30
    assert "scale-collapse" not in run.causes


def test_update_that_is_not_finite_although_its_gradients_are(guard: Guard) -> None:
    """Nothing was wrong with the initial values: no advice to initialise them anew."""

    def body() -> None:
        seed_everything()
        weight = nn.Parameter(torch.randn(3))
        optimizer = torch.optim.SGD([weight], lr=1e-3)
        for _ in range(3):
            optimizer.param_groups[0]["lr"] = math.nan  # of a schedule
            optimizer.zero_grad()
            (torch.tensor([1.0, 0.0, 2.0]) * weight).pow(2).sum().backward()
            optimizer.step()

    incident = guard(body).first
    assert (incident.cause, incident.step) == ("nonfinite-parameter", 1)
    assert "The parameter `weight` was not finite" in incident.explanation
    assert "the `lr` of SGD is nan" in incident.explanation
    assert [fix.action for fix in incident.fixes] == ["lower-learning-rate", "load-weights"]
    assert "repair the schedule, which gave SGD a learning rate of nan in step 0" in incident.fixes[0].how


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.RMSprop, partial(torch.optim.AdamW, fused=True)])
@pytest.mark.parametrize("all_of_it", [True, False])
def test_weights_that_were_bad_before_any_step_used_them(
    make: Callable[..., torch.optim.Optimizer], all_of_it: bool, guard: Guard
) -> None:
    """The losses before were finite, and no update has done it: to initialise them is the advice."""

    def body() -> None:
        seed_everything()
        table, extra = nn.Embedding(6, 4), nn.Parameter(torch.full((4,), math.nan))
        with torch.no_grad():
            table.weight[5] = math.nan
        optimizer = make([*table.parameters(), extra], lr=1e-2)
        for step in range(8):
            late = step == 6
            rows = torch.tensor([0, 1, 5 if late and not all_of_it else 2])
            out = table(rows).pow(2).sum()
            optimizer.zero_grad()
            (out + extra.sum() if late and all_of_it else out).backward()
            optimizer.step()

    incident = guard(body).first
    assert (incident.cause, incident.step) == ("nonfinite-parameter", 6)
    assert "step 0, when they were looked at" in incident.explanation
    assert [fix.action for fix in incident.fixes if fix.verified] == ["initialise-parameter"]
