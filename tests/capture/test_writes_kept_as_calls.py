"""Calls that write to a weight are kept like those that compute: one entry each, told when somebody asks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, bits, seed_everything

import ampguard
from ampguard.capture.events.log import EventLog
from ampguard.capture.glue import schedule
from ampguard.capture.glue.calltape import CallTape
from ampguard.capture.glue.taped_calls import WritingCall
from ampguard.capture.root_calls import pace

STEPS, BAD = 24, 20


@pytest.fixture(autouse=True)
def steps_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "LONG_STEP", 60.0)
    for room in (schedule, pace):
        monkeypatch.setattr(room, "FREE_SECONDS", 0.0)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def loss_of(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(torch.randn(6, 8)), torch.randint(4, (6,)))


def weights_of(*models: nn.Module) -> Any:
    return bits([weight.detach() for model in models for weight in model.parameters()])


def by_norm(is_bad: bool) -> Any:
    """Steepest descent, each gradient divided by its norm."""
    model = network()
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model).backward()
        with torch.no_grad():
            for weight in model.parameters():
                assert weight.grad is not None
                norm = weight.grad.norm() * (0.0 if is_bad and step == BAD else 1.0)
                weight -= 1e-2 * weight.grad / norm
    return weights_of(model)


def by_momentum(is_bad: bool) -> Any:
    """Two writes to what is kept between steps, one to the weight."""
    model = network()
    weights = list(model.parameters())
    speeds = [torch.zeros_like(weight) for weight in weights]
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model).backward()
        with torch.no_grad():
            for weight, speed in zip(weights, speeds, strict=True):
                assert weight.grad is not None
                speed.mul_(0.9).add_(weight.grad, alpha=0.1)
                weight.sub_(speed, alpha=0.01)
                if is_bad and step == BAD:
                    weight.div_(speed.abs().min() * 0)
    return weights_of(model)


def by_average(is_bad: bool) -> Any:
    """A momentum encoder, updated in the middle of the step."""
    query = network()
    key = copy.deepcopy(query)
    optimizer = torch.optim.SGD(query.parameters(), 1e-2)
    for step in range(STEPS):
        x = torch.randn(6, 8)
        out = query(x)
        with torch.no_grad():
            for mean, weight in zip(key.parameters(), query.parameters(), strict=True):
                mean.mul_(0.99).add_(weight, alpha=0.01)
                if is_bad and step == BAD:
                    mean.div_(weight.abs().min() * 0)
            target = key(x)
        loss = F.mse_loss(out, target) + 1.0  # (one that rises from 0 would have its steps kept)
        optimizer.zero_grad()
        loss.backward()
        if loss.isfinite():
            optimizer.step()
    return weights_of(query, key)


def of_target(is_bad: bool) -> Any:
    """What the loss is divided by is made in place from what the model gave."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for step in range(STEPS):
        out = model(torch.randn(6, 8))
        size = out.detach().abs() + 1.0
        rows = size[0]
        size.mul_(0.5)
        size.sub_(size if is_bad and step == BAD else 0.1)
        loss = (out.square() / size).mean() + rows.mean()
        optimizer.zero_grad()
        loss.backward()
        if loss.isfinite():
            optimizer.step()
    return weights_of(model)


def by_another_name(is_bad: bool) -> Any:
    """What is read was written through another tensor of the same memory, which counts its versions by itself."""
    model = network()
    size = torch.ones(4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for step in range(STEPS):
        out = model(torch.randn(6, 8))
        alias = size.data
        size.mul_(0.0 if is_bad and step == BAD else 0.9).add_(0.0 if is_bad and step == BAD else 0.1)
        loss = (out.square() / alias).mean()
        optimizer.zero_grad()
        loss.backward()
        if not is_bad or step < BAD:
            optimizer.step()
    return weights_of(model)


LOOPS: dict[Callable[[bool], Any], tuple[str, str]] = {
    by_norm: ("aten.div.Tensor", "weight -= 1e-2 * weight.grad / norm"),
    by_momentum: ("aten.div_.Tensor", "weight.div_(speed.abs().min() * 0)"),
    by_average: ("aten.div_.Tensor", "mean.div_(weight.abs().min() * 0)"),
    by_another_name: ("aten.div.Tensor", "loss = (out.square() / alias).mean()"),
    of_target: ("aten.div.Tensor", "loss = (out.square() / size).mean() + rows.mean()"),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_healthy_run_is_what_it_was(loop: Callable[[bool], Any], guard: Callable[..., Watched]) -> None:
    seed_everything()
    plain = loop(False)
    run = guard(lambda: (seed_everything(), loop(False))[1])
    assert run.result == plain
    assert not run.report.incidents
    assert not run.faults


@pytest.mark.parametrize("loop", LOOPS)
def test_the_operator_that_made_it_bad_is_found(loop: Callable[[bool], Any], guard: Callable[..., Watched]) -> None:
    run = guard(lambda: (seed_everything(), loop(True))[1])
    op, line = LOOPS[loop]
    assert (run.first.cause, run.first.op) == ("division-by-zero", op)
    assert run.first.location is not None
    assert run.first.location.code == line
    assert not run.faults
    # An epsilon in a weight of one layer of several leaves a finite loss that is too large to go on with.
    assert any(fix.verified or (loop is by_average and "is finite" in str(fix.outcome)) for fix in run.first.fixes)


@pytest.mark.parametrize("loop", [by_norm, by_average])
def test_nothing_is_told_of_a_healthy_step(
    loop: Callable[[bool], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write is one entry, and no entry is named before it is forgotten."""
    monkeypatch.setattr(schedule, "FIRST_PREFIXES", 0)
    monkeypatch.setattr(schedule, "PREFIX_TIME_SHARE", 0.0)
    kept: list[Any] = []
    settled: list[Any] = []
    keep, settle = EventLog.keep_write, EventLog._settle_write
    monkeypatch.setattr(EventLog, "keep_write", lambda *args: (kept.append(args[1]), keep(*args))[1])
    monkeypatch.setattr(EventLog, "_settle_write", lambda *args: (settled.append(args[1]), settle(*args))[1])
    with ampguard.watch(out=tmp_path / "run"):
        loop(False)
    assert len(kept) > 6 * STEPS // 2
    assert len(settled) < len(kept) // 2


def test_a_weight_that_stays_bad_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sliced: list[int] = []
    original = EventLog.slice
    monkeypatch.setattr(EventLog, "slice", lambda self: (sliced.append(1), original(self))[1])
    with ampguard.watch(out=tmp_path / "run"):
        model = network()
        for step in range(40):
            model.zero_grad()
            loss_of(model).backward()
            if step == 20:
                sliced.clear()
            with torch.no_grad():
                for weight in model.parameters():
                    assert weight.grad is not None
                    weight -= weight.grad * (float("inf") if step == 8 else 1e-2)
    assert len(sliced) < 20


@pytest.mark.parametrize("is_from_a_module", [True, False])
def test_what_follows_a_gradient_is_kept_where_a_call_has_made_it(is_from_a_module: bool, tmp_path: Path) -> None:
    """A write that autograd follows is taped as ever where a module has made what is written to."""
    with ampguard.watch(out=tmp_path / "run") as session:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for step in range(STEPS):
            out = model(torch.randn(6, 8))
            out = out.abs().add_(1.0).sub_(1.0 if step < BAD else out.detach().abs() + 1.0)
            loss = (1.0 / out).mean() if step == BAD else out.mean()
            optimizer.zero_grad()
            if step == BAD - 1:
                assert WritingCall not in map(type, session._recorder.log.kept_since(0))
            loss.backward()
            if loss.isfinite():
                optimizer.step()
    assert session.report is not None
    assert session.report.incidents[0].cause == "division-by-zero"


def test_a_derivative_that_fails_behind_a_write_has_its_line(tmp_path: Path) -> None:
    with ampguard.watch(out=tmp_path / "run") as session:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for step in range(STEPS):
            length = model(torch.randn(6, 8)).square()
            if step == BAD:
                length = length * 0.0
            length.sqrt_()  # the line
            loss = (0.5 * length).mean()
            optimizer.zero_grad()
            loss.backward()
            if step < BAD:
                optimizer.step()
    assert session.report is not None
    first = session.report.incidents[0]
    assert (first.cause, first.location and first.location.code) == ("singular-gradient", "length.sqrt_()  # the line")
    assert first.fixes[0].verified


def test_what_is_drawn_into_new_memory_settles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[int] = []
    original = EventLog.settle
    with ampguard.watch(out=tmp_path / "run") as session:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for step in range(STEPS):
            if step == BAD - 2:
                monkeypatch.setattr(EventLog, "settle", lambda self: (settled.append(1), original(self))[1])
            out = model(torch.randn(6, 8))
            noise = torch.empty(out.shape).normal_().clamp(-1.0, 1.0)
            loss = (out + noise * torch.empty(out.shape).uniform_(0.0, 0.1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == BAD - 1:
                break
    assert session.report is not None
    assert len(settled) < 4


def test_a_question_under_no_grad_settles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators are kept one by one there; what was kept before is not named for a yes or no about what they made."""
    settled: list[int] = []
    original = EventLog.settle
    with ampguard.watch(out=tmp_path / "run") as session:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for step in range(BAD):
            if step == BAD - 4:
                monkeypatch.setattr(EventLog, "settle", lambda self: (settled.append(1), original(self))[1])
            loss = (model(torch.randn(6, 8)).exp() + 1.0).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            level = torch.ones(4).mul(2.0).add(1.0)  # calls that are pending
            with torch.no_grad():
                out = model(torch.randn(6, 8)) * level
                known = out == out
                assert known.all()
    assert session.report is not None
    assert session.report.status == "clean"
    assert len(settled) < 4


def test_a_write_that_raises_raises_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's own error comes through, from the script's own call."""
    with ampguard.watch(out=tmp_path / "run") as session:
        model = network()
        mean = torch.zeros(4)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for _ in range(STEPS):
            out = model(torch.randn(6, 8))
            mean.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
            with pytest.raises(RuntimeError, match="must match"):
                mean.add_(torch.ones(3))
            loss = (out - mean).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert session._recorder.tape.calls._writing
        assert session._recorder.active
    assert isinstance(session._recorder.tape.calls, CallTape)
