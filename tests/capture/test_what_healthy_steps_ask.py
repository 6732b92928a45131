"""Healthy steps of ordinary loops: what is kept of them is named, counted and looked through as little as can be."""

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
from ampguard.capture.events.producers import Producers
from ampguard.capture.glue import schedule
from ampguard.capture.root_calls import pace

STEPS, FIRST = 24, 16
"""Steps, and the first of those that are looked at."""

Steps = Iterator[list[nn.Parameter]]


@pytest.fixture(autouse=True)
def no_free_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in (schedule, pace):
        monkeypatch.setattr(room, "FREE_SECONDS", 0.0)


def network() -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.ReLU())], nn.Linear(8, 4))


def decay_before_the_model() -> Steps:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    while True:
        x = torch.randn(6, 8)
        decay = sum(weight.pow(2).sum() for weight in model.parameters())
        loss = F.cross_entropy(model(x), torch.zeros(6, dtype=torch.long)) + 1e-4 * decay
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield list(model.parameters())


def two_modules() -> Steps:
    encoder, decoder = nn.Linear(8, 6), nn.Linear(3, 8)
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], 1e-3)
    while True:
        x = torch.randn(4, 8)
        mean, scale = encoder(x).chunk(2, 1)
        loss = (decoder(mean + (0.5 * scale).exp()) - x).square().mean() + scale.exp().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield [*encoder.parameters(), *decoder.parameters()]


def accumulated() -> Steps:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    while True:
        for _ in range(3):
            (F.cross_entropy(model(torch.randn(6, 8)), torch.zeros(6, dtype=torch.long)) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield list(model.parameters())


def two_players() -> Steps:
    maker, judge = network(), nn.Linear(4, 1)
    of_maker, of_judge = (torch.optim.SGD(model.parameters(), 1e-3) for model in (maker, judge))
    while True:
        loss = (
            F.softplus(judge(maker(torch.randn(6, 8)).detach())).mean() + F.softplus(-judge(torch.randn(6, 4))).mean()
        )
        of_judge.zero_grad()
        loss.backward()
        of_judge.step()
        of_maker.zero_grad()
        F.softplus(-judge(maker(torch.randn(6, 8)))).mean().backward()
        of_maker.step()
        yield [*maker.parameters(), *judge.parameters()]


def by_hand() -> Steps:
    model = network()
    while True:
        model.zero_grad()
        F.cross_entropy(model(torch.randn(6, 8)), torch.zeros(6, dtype=torch.long)).backward()
        with torch.no_grad():
            for weight in model.parameters():
                assert weight.grad is not None
                weight -= 1e-3 * weight.grad
        yield list(model.parameters())


LOOPS = (decay_before_the_model, two_modules, accumulated, two_players, by_hand)


@pytest.mark.parametrize("loop", LOOPS)
def test_nothing_is_changed(loop: Callable[[], Steps], guard: Callable[..., Watched]) -> None:
    def train() -> Any:
        seed_everything()
        steps = loop()
        for _ in range(STEPS):
            weights = next(steps)
        return bits([weight.detach() for weight in weights])

    plain = train()
    run = guard(train)
    assert run.result == plain
    assert not run.report.incidents
    assert not run.faults


@pytest.mark.parametrize("loop", [decay_before_the_model, two_modules])
def test_no_call_outside_modules_is_named(
    loop: Callable[[], Steps], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[int] = []
    original = EventLog._settle_call
    monkeypatch.setattr(EventLog, "_settle_call", lambda *args: (named.append(1), original(*args))[1])
    with ampguard.watch(out=tmp_path / "run"):
        steps = loop()
        for step in range(STEPS):
            if step == FIRST:
                named.clear()
            next(steps)
        assert len(named) < 100  # of some 40 a step: in one of them it is seen whether they are used


@pytest.mark.parametrize("loop", [accumulated, two_players])
def test_a_batch_that_is_only_drawn_was_not_prepared(loop: Callable[[], Steps], tmp_path: Path) -> None:
    with ampguard.watch(out=tmp_path / "run") as session:
        steps = loop()
        for _ in range(4):
            next(steps)
        assert not session._recorder.log.goes_on_after_backward


def test_a_batch_that_is_computed_was_prepared(tmp_path: Path) -> None:
    """Each of them: the operator that makes the third one bad is found."""
    with ampguard.watch(out=tmp_path / "run") as session:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(STEPS):
            for part in range(3):
                x = torch.randn(6, 8).abs()
                x = x / (x.sum(1, keepdim=True) * (0.0 if (step, part) == (STEPS - 1, 2) else 1.0))
                (model(x).square().mean() / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert session._recorder.log.goes_on_after_backward
    assert session.report is not None
    assert [i.cause for i in session.report.incidents][:1] == ["division-by-zero"]


def test_a_write_looks_at_what_shares_its_memory_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    original = Producers._lying_in

    def noted(self: Producers, memory: int) -> list[int]:
        tensors = original(self, memory)
        found.append(len(tensors))
        return tensors

    monkeypatch.setattr(Producers, "_lying_in", noted)
    monkeypatch.setattr(schedule, "LONG_STEP", 0.0)  # operators are taped
    monkeypatch.setattr(schedule, "MUCH_GLUE", 1e9)
    with ampguard.watch(out=tmp_path / "run"):
        steps = by_hand()
        for _ in range(STEPS):
            next(steps)
    assert found
    assert max(found) <= 2


@pytest.mark.parametrize("is_filled_last", [False, True])
def test_an_alias_that_was_written_to_has_its_new_value(is_filled_last: bool, tmp_path: Path) -> None:
    """Rows of a result are written one by one: what is read by another name of it is what was written."""

    def target(out: Tensor, is_bad: bool) -> Tensor:
        rows = out.detach().abs() + 1.0
        whole = rows.view(-1)
        for i in range(3):
            rows[i].mul_(0.0 if is_bad and i == 2 else 1.0)
        return rows if is_filled_last else whole.view_as(rows)

    with ampguard.watch(out=tmp_path / "run") as session:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(6):
            out = model(torch.randn(3, 8))
            loss = (out / target(out, step == 5)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert session.report is not None
    incident = session.report.incidents[0]
    assert incident.cause in ("division-by-zero", "indeterminate")
    assert incident.op == "aten.div.Tensor"
