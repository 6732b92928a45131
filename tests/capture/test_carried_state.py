"""State that a script keeps outside of modules: what spoils it is told, once something has read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampguard.capture import flags
from ampguard.capture.glue import schedule
from ampguard.capture.judging import carried
from ampguard.capture.root_calls import pace
from ampguard.diagnose.cases.examiner import Examiner

STEPS, BAD = 30, 20
Guard = Callable[..., Any]


class Bound:
    """Running figures, bound anew in each step."""

    def __init__(self) -> None:
        self.scale = torch.ones(8)

    def update(self, x: Tensor) -> None:
        self.scale = 0.9 * self.scale + 0.1 * (x.abs().mean(0) / x.std(0))

    def read(self) -> Tensor:
        return self.scale


class Written(Bound):
    """The same, written in place."""

    def update(self, x: Tensor) -> None:
        ratio = x.abs().mean(0) / x.std(0)
        self.scale.mul_(0.9).add_(ratio, alpha=0.1)


class Table(Bound):
    """A row of a table for each step."""

    def __init__(self) -> None:
        self.rows = torch.ones(4, 8)
        self.next = 0

    def update(self, x: Tensor) -> None:
        self.rows[self.next % 4] = x.abs().mean(0) / x.std(0)
        self.next += 1

    def read(self) -> Tensor:
        return self.rows.mean(0)


class Listed(Bound):
    """The last few, in a list."""

    def __init__(self) -> None:
        self.last = [torch.ones(8)]

    def update(self, x: Tensor) -> None:
        self.last.append(x.abs().mean(0) / x.std(0))
        del self.last[:-4]

    def read(self) -> Tensor:
        return torch.stack(self.last).mean(0)


class ByName(Bound):
    """In a dictionary."""

    def __init__(self) -> None:
        self.means = {"even": torch.ones(8), "odd": torch.ones(8)}
        self.next = 0

    def update(self, x: Tensor) -> None:
        name = ("even", "odd")[self.next % 2]
        self.means[name] = 0.5 * self.means[name] + 0.5 * (x.abs().mean(0) / x.std(0))
        self.next += 1

    def read(self) -> Tensor:
        return self.means["even"] + self.means["odd"]


def training(state: Bound, when: str, bad: int = BAD, reads: bool = True, since: int = 0, every: int = 1) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        x = torch.randn(16, 8)
        if step == bad:
            x[:, 3] = 0.0
        loss = model(x / state.read() if reads else x).square().mean()
        place = when if step >= since and step % every == 0 else ""
        if place == "before backward":
            state.update(x)
        optimizer.zero_grad()
        loss.backward()
        if place == "behind backward":
            state.update(x)
        optimizer.step()
        if place == "behind the step":
            state.update(x)


KINDS = (Bound, Written, Table, Listed, ByName)


@pytest.mark.parametrize("when", ["before backward", "behind backward", "behind the step"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_late", [False, True])
def test_what_spoils_it_is_told(
    guard: Guard, kind: type[Bound], when: str, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`is_late`: as late in a run of short steps, in which nothing is free any more."""
    if is_late:
        monkeypatch.setattr(schedule, "LONG_STEP", 60.0)
        for room in (schedule, pace):
            monkeypatch.setattr(room, "FREE_SECONDS", 0.0)
    run = guard(lambda: training(kind(), when))
    assert run.faults == 0, run.stderr
    (first,) = run.report.incidents
    is_after = when == "behind the step"  # which belongs to the next, where no loader says when that begins
    assert (first.cause, first.step, first.severity) == ("division-by-zero", BAD + is_after, "error")
    assert "x.std(0)" in first.location.code
    assert is_after or "It is kept over the steps" in first.explanation
    assert first.fixes[0].verified


@pytest.mark.parametrize("when", ["before backward", "behind backward"])
@pytest.mark.parametrize("kind", [Bound, Written, ByName])
@pytest.mark.parametrize("since", [10, BAD])
def test_what_is_first_updated_late_and_seldom(guard: Guard, kind: type[Bound], when: str, since: int) -> None:
    run = guard(lambda: training(kind(), when, since=since, every=5))
    assert run.faults == 0, run.stderr
    (first,) = run.report.incidents
    assert (first.cause, first.step, first.severity) == ("division-by-zero", BAD, "error")


@pytest.mark.parametrize("kind", KINDS)
def test_figures_that_nothing_reads_are_nobodys_business(guard: Guard, kind: type[Bound]) -> None:
    run = guard(lambda: training(kind(), "before backward", reads=False))
    assert run.faults == 0, run.stderr
    assert run.report.incidents == ()


class Scaler:
    """Streaming statistics, in an object of their own."""

    def __init__(self, in_place: bool) -> None:
        self.scale = torch.ones(8)
        self.in_place = in_place

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        ratio = x.abs().mean(0) / x.std(0)
        if self.in_place:
            self.scale.mul_(0.9).add_(ratio, alpha=0.1)
        else:
            self.scale = 0.9 * self.scale + 0.1 * ratio


MEMORY = {"scale": torch.ones(8)}
BY_LAYER = {"first": {"scale": torch.ones(8)}}


class Observing(nn.Module):
    """Normalises what it is given by what it has seen before."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.kind = kind
        self.scaler = Scaler(kind == "written")

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "global":
            out = self.linear(x / MEMORY["scale"])
            with torch.no_grad():
                MEMORY["scale"] = 0.9 * MEMORY["scale"] + 0.1 * (x.abs().mean(0) / x.std(0))
            return out
        if self.kind == "nested":
            out = self.linear(x / BY_LAYER["first"]["scale"])
            with torch.no_grad():
                BY_LAYER["first"]["scale"] = 0.9 * BY_LAYER["first"]["scale"] + 0.1 * (x.abs().mean(0) / x.std(0))
            return out
        out = self.linear(x / self.scaler.scale)
        self.scaler.observe(x)
        return out


def observed(kind: str, reads: bool) -> None:
    torch.manual_seed(0)
    MEMORY["scale"] = torch.ones(8)
    BY_LAYER["first"]["scale"] = torch.ones(8)
    model = Observing(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        x = torch.randn(16, 8)
        if step == BAD:
            x[:, 3] = 0.0
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == BAD and not reads:
            return


@pytest.mark.parametrize("kind", ["bound", "written", "global", "nested"])
def test_what_spoils_it_within_a_call_is_told(guard: Guard, kind: str) -> None:
    run = guard(lambda: observed(kind, reads=True))
    assert run.faults == 0, run.stderr
    (first,) = run.report.incidents
    assert (first.cause, first.step, first.severity) == ("division-by-zero", BAD, "error")
    assert "x.std(0)" in first.location.code
    assert "It is kept over the steps" in first.explanation
    assert first.fixes[0].verified


@pytest.mark.parametrize("kind", ["bound", "written", "global", "nested"])
def test_nothing_is_told_before_it_is_read(guard: Guard, kind: str) -> None:
    run = guard(lambda: observed(kind, reads=False))
    assert run.faults == 0, run.stderr
    assert run.report.incidents == ()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's tensors are taken for a device's, which is asked and answers later."""
    for module in (carried, flags):
        monkeypatch.setattr(module, "is_immediate", lambda tensor: False)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("when", ["before backward", "behind the step"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_device_is_asked(guard: Guard, kind: type[Bound], when: str) -> None:
    run = guard(lambda: training(kind(), when))
    assert run.faults == 0, run.stderr
    (first,) = run.report.incidents
    assert (first.cause, first.step) == ("division-by-zero", BAD + (when == "behind the step"))
    assert "x.std(0)" in first.location.code


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("kind", ["bound", "global"])
def test_a_device_is_asked_about_what_calls_bind(guard: Guard, kind: str) -> None:
    run = guard(lambda: observed(kind, reads=True))
    assert run.faults == 0, run.stderr
    (first,) = run.report.incidents
    assert (first.cause, first.step) == ("division-by-zero", BAD)
    assert "It is kept over the steps" in first.explanation


def test_figures_that_go_bad_again_and_again_are_looked_into_a_few_times(
    guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    look = Examiner._look_at_state

    def counted(self: Examiner, bad: Any) -> None:
        looks.append(bad.step)
        look(self, bad)

    monkeypatch.setattr(Examiner, "_look_at_state", counted)

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        history: list[Tensor] = []
        for step in range(80):
            x = torch.randn(16, 8)
            loss = model(x).square().mean()
            history.append(x.mean() / (step % 2))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert not run.report.incidents
    assert 1 <= len(looks) <= 10


def whitened(least: int, jitter: float, when: str, damps: bool = False) -> list[str]:
    """A running covariance, factorized in the next step; the script goes on where PyTorch refuses it.
    The batch of step 12 has `least` rows; `damps`: what is refused is looked at again, after it was made anew."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    covariance, caught = torch.eye(4), []
    for step in range(16):
        x = torch.randn(least if step == 12 else 16, 8)
        residual = model(x) - 1
        try:
            factor = torch.linalg.cholesky(covariance + jitter * torch.eye(4) if jitter else covariance)
        except torch.linalg.LinAlgError as error:
            caught.append(str(error))
            if not damps:
                break
            factor = covariance = torch.eye(4)
        loss = torch.linalg.solve_triangular(factor, residual.T, upper=False).square().mean()
        optimizer.zero_grad()
        rows = residual.detach()
        rows = rows - rows.mean(0)
        if when == "before backward":
            covariance = 0.9 * covariance + 0.1 * (rows.T @ rows) / (len(rows) - 1)
        loss.backward()
        optimizer.step()
        if when == "behind the step":
            covariance = 0.9 * covariance + 0.1 * (rows.T @ rows) / (len(rows) - 1)
    return caught


@pytest.mark.parametrize("damps", [False, True])
@pytest.mark.parametrize("jitter", [0.0, 1e-4])
@pytest.mark.parametrize("when", ["before backward", "behind the step"])
def test_an_operator_that_refuses_it_has_read_it(guard: Guard, when: str, jitter: float, damps: bool) -> None:
    caught: list[str] = []
    run = guard(lambda: caught.extend(whitened(1, jitter, when, damps)))
    assert run.faults == 0, run.stderr
    assert len(caught) == 1
    (first,) = run.report.incidents
    step = 12 + (when == "behind the step")
    assert (first.cause, first.step, first.severity) == ("division-by-zero", step, "error")
    assert "len(rows) - 1" in first.location.code
    assert "what fails in step 13 reads it" in first.explanation


def test_what_an_operator_refuses_for_another_reason_is_nobodys_business(guard: Guard) -> None:
    caught: list[str] = []

    def body() -> None:
        for rows in (torch.randn(16, 4), torch.randn(16, 4), torch.randn(16, 4), torch.randn(2, 4)):
            model = nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            try:
                factor = torch.linalg.cholesky(rows.T @ rows - 1e-3 * torch.eye(4))
            except torch.linalg.LinAlgError as error:
                caught.append(str(error))
                factor = torch.eye(4)
            model(rows @ factor).sum().backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert len(caught) == 1
    assert not run.report.incidents


class Adjusted(nn.Module):
    """Adds to its scores, in evaluation, the logarithm of how often each class came in the last epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.counts: Tensor
        self.prior: Tensor
        self.register_buffer("counts", torch.zeros(3))
        self.register_buffer("prior", torch.zeros(3))

    @torch.no_grad()
    def observe(self, target: Tensor) -> None:
        self.counts += torch.bincount(target, minlength=3)

    @torch.no_grad()
    def refresh(self) -> None:
        self.prior.copy_((self.counts / self.counts.sum()).log())
        self.counts.zero_()

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layer(x)
        return scores if self.training else scores - self.prior


def adjusted(bad_epoch: int) -> list[float]:
    torch.manual_seed(0)
    model = Adjusted()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    found = []
    for epoch in range(8):
        model.train()
        for _ in range(10):
            target = torch.randint(2 if epoch == bad_epoch else 3, (16,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.randn(16, 8)), target).backward()
            optimizer.step()
            model.observe(target)
        model.refresh()
        model.eval()
        with torch.no_grad():
            logs = [model(torch.randn(16, 8)).log_softmax(1)[:, 0].mean().item() for _ in range(2)]
        found.append(sum(logs))
    return found


def test_what_an_epoch_leaves_to_its_evaluation_is_followed(guard: Guard) -> None:
    """Written once in many steps, before the gradients are cleared, and forgotten by the evaluation that comes right behind."""
    run = guard(lambda: adjusted(5))
    assert run.faults == 0, run.stderr
    assert run.result[5] != run.result[5]
    (incident,) = run.report.incidents
    assert (incident.cause, incident.severity) == ("domain-error", "error")
    assert incident.step in (59, 60)
    assert "self.prior.copy_" in incident.location.code
    assert incident.fixes[0].verified
