"""A stretch of steps is kept while a run seems to go wrong: it changes nothing, is bounded, and is dropped when all is well."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import Net
from torch import nn
from torch.nn import functional as F  # noqa: N812
from watching import fingerprint, seed_everything, watched

import ampguard
from ampguard.capture.sampling.copies import take_snapshot
from ampguard.capture.sampling.keeper import (
    CALM_STEPS_AT_A_NEW_RATE,
    LONGEST_ALARM,
    SEGMENT_STEPS,
    SEGMENTS,
    StretchKeeper,
)
from ampguard.capture.sampling.memory import available_bytes, host_bytes
from ampguard.run.session import Session

JUMP_AT = 12


def keeper_of(session: Session) -> StretchKeeper:
    return session._dynamics.keeper


def train(
    factor: float, steps: int, look: Callable[[int], object] = lambda step: None, scaled: bool = False
) -> dict[str, Any]:
    """Attention, BatchNorm, dropout and random depth; the learning rate is multiplied at step 12."""
    seed_everything()
    model = Net()
    if scaled:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, enabled=scaled)
    losses = []
    for step in range(steps):
        if step == JUMP_AT:
            optimizer.param_groups[0]["lr"] *= factor
        x, y = torch.randn(5, 6, 4), torch.randn(5, 3)
        with torch.autocast("cpu", dtype=torch.float16, enabled=scaled):
            out = model(x)
            loss = F.mse_loss(out.float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
        look(step)
    return fingerprint(model, optimizer, scaler, losses)


@pytest.mark.parametrize("scaled", [False, True], ids=["sgd", "adamw, scaler"])
@pytest.mark.parametrize("factor", [8.0, 1e6, 1e20])
def test_keeping_and_replaying_change_no_bit(
    factor: float, scaled: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Harmless, diverging slowly, diverging at once: the same bits with and without the guard."""
    armed: list[int] = []
    alone = train(factor, 40, scaled=scaled)

    def body() -> dict[str, Any]:
        return train(factor, 40, lambda step: armed.append(len(kept_steps())), scaled)

    def kept_steps() -> list[Any]:
        from ampguard.run import session

        stretch = keeper_of(session._guarding).stretch if session._guarding is not None else None
        return stretch.steps if stretch is not None else []

    run = watched(body, tmp_path / "run", capsys)

    assert run.faults == 0, run.stderr
    assert max(armed) > 0, "nothing was kept: this test shows nothing"
    assert run.result == alone


def healthy(steps: int, look: Callable[[int], object], jump: float = 5.0) -> None:
    seed_everything()
    model = nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(steps):
        if step == JUMP_AT:
            optimizer.param_groups[0]["lr"] *= jump
        loss = model(torch.randn(32, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        look(step)


def test_what_was_kept_goes_when_the_alarm_has_passed(tmp_path: Path) -> None:
    kept: dict[int, int] = {}
    seen: list[weakref.ref[Any]] = []
    with ampguard.watch(out=tmp_path / "run") as session:

        def look(step: int) -> None:
            stretch = keeper_of(session).stretch
            kept[step] = len(stretch.steps) if stretch is not None else 0
            if stretch is not None:
                seen.extend(weakref.ref(copy) for _, copy in stretch.snapshot.pairs())
                seen.append(weakref.ref(stretch.snapshot))

        healthy(80, look)
        gc.collect()
        assert seen
        assert all(ref() is None for ref in seen), "something holds on to it"

    assert all(kept[step] == 0 for step in range(JUMP_AT)), "a healthy run is not copied"
    assert kept[JUMP_AT] == 1
    assert kept[JUMP_AT + 7] == 8
    assert kept[JUMP_AT + CALM_STEPS_AT_A_NEW_RATE - 1] >= SEGMENT_STEPS, "a rate that is too large may take its time"
    assert kept[79] == 0
    assert session.report is not None
    assert session.report.incidents == ()


def test_a_healthy_run_raises_no_alarm(tmp_path: Path) -> None:
    with ampguard.watch(out=tmp_path / "run") as session:
        healthy(200, lambda step: None, jump=1.0)
        assert keeper_of(session).stretch is None
        assert keeper_of(session).alarms_raised == 0


def test_only_so_many_steps_are_kept_and_a_new_level_becomes_the_usual(tmp_path: Path) -> None:
    """The loss jumps for good: kept are at most two segments, and after a while nothing."""
    lengths: list[int] = []
    with ampguard.watch(out=tmp_path / "run") as session:
        seed_everything()
        model = nn.Linear(16, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
        for step in range(JUMP_AT + LONGEST_ALARM + 20):
            loss = model(torch.randn(32, 16)).square().mean() * (50.0 if step > JUMP_AT else 1.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            stretch = keeper_of(session).stretch
            lengths.append(len(stretch.steps) if stretch is not None else 0)
    assert SEGMENT_STEPS < max(lengths) <= SEGMENTS * SEGMENT_STEPS
    assert min(lengths[2 * SEGMENT_STEPS + JUMP_AT : LONGEST_ALARM]) >= SEGMENT_STEPS - 1
    assert lengths[-1] == 0


def test_without_room_nothing_is_kept_and_the_report_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ampguard.watch(out=tmp_path / "run") as session:
        keeper_of(session).limit = lambda tensors: 800
        train(1e20, 40)
    assert session.report is not None
    fixes = [f for i in session.report.incidents for f in i.fixes if f.action == "lower-learning-rate"]
    assert fixes
    assert all(fix.verified is None and "MB may be used" in str(fix.outcome) for fix in fixes)


@pytest.mark.parametrize("own", [True, False], ids=["batches of their own", "one data set"])
def test_inputs_count_as_well(own: bool, tmp_path: Path) -> None:
    """The weights fit, the batches do not; a data set from which all of them are taken is the script's own."""
    with ampguard.watch(out=tmp_path / "run") as session:
        keeper = keeper_of(session)
        keeper.limit = lambda tensors: 4_000_000
        seed_everything()
        model = nn.Linear(512, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
        refusals = []
        count = JUMP_AT + 20
        batches: Any = [torch.randn(64, 512) for _ in range(count)] if own else torch.randn(count, 64, 512)
        for step in range(JUMP_AT + 20):
            if step == JUMP_AT:
                optimizer.param_groups[0]["lr"] = 1e-4
            loss = model(batches[step]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if keeper.stretch is not None:
                refusals.append(keeper.stretch.refusal)
    assert refusals
    assert ("inputs of these steps" in str(refusals[-1])) == own


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop])
def test_copied_optimizer_makes_the_same_step_and_touches_nothing(kind: type[torch.optim.Optimizer]) -> None:
    seed_everything()
    model = nn.Linear(5, 3)
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)

    def step() -> None:
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        schedule.step()

    step()
    snapshot = take_snapshot([optimizer])
    assert not isinstance(snapshot, str)
    before = fingerprint(model, optimizer)
    stand_ins, (copied,) = snapshot.stand_ins()
    for parameter in model.parameters():
        stand_ins[id(parameter)].grad = torch.ones_like(parameter) * 2
    copied.step()
    assert fingerprint(model, optimizer) == before

    optimizer.zero_grad()
    step()
    for parameter in model.parameters():
        torch.testing.assert_close(parameter, stand_ins[id(parameter)])


def test_optimizer_that_holds_a_model_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.model = model  # type: ignore[attr-defined]
    assert "SGD.model cannot be copied" in str(take_snapshot([optimizer]))


def test_memory_that_is_left_is_known_here() -> None:
    left = host_bytes()
    assert left is not None
    assert 1 << 20 < left < 1 << 50
    assert available_bytes([torch.ones(3)]) is not None
