"""Steps whose glue was not taped: told from the autograd graph, they are what the tape would have recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ampguard
from ampguard.capture import resting, usual
from ampguard.capture.record import GlueOp, Held, Ref, RestedGlue, StepRecord, refs_in

STEPS = 36
WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 1.0])
OBJECTIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross entropy": functional.cross_entropy,
    "weighted": lambda out, y: functional.cross_entropy(out, y, WEIGHTS),
    "mean of squares": lambda out, y: out.float().pow(2).mean() + functional.cross_entropy(out, y),
    "two terms": lambda out, y: functional.cross_entropy(out, y) + 0.1 * out.float().pow(2).mean(),
    "focal": lambda out, y: (1 - torch.exp(-functional.cross_entropy(out, y, reduction="none"))).pow(2).mean(),
    "divided": lambda out, y: functional.nll_loss(functional.log_softmax(out, 1), y) / 4,
}
TAPED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "an operand that no derivative needs": lambda out, y: (out - functional.one_hot(y, 4)).abs().mean(),
    "random": lambda out, y: functional.cross_entropy(functional.dropout(out, 0.5), y),
    "in place": lambda out, y: functional.cross_entropy(out, y, label_smoothing=0.1),
    "in place by the script": lambda out, y: functional.cross_entropy(out.clone().mul_(2.0), y),
    "hooked": lambda out, y: _hooked(functional.cross_entropy(out, y)),
    "read before": lambda out, y: _read(functional.cross_entropy(out, y)),
}


def _hooked(loss: Tensor) -> Tensor:
    loss.register_hook(lambda gradient: gradient * 0.5)
    return loss


def _read(loss: Tensor) -> Tensor:
    assert loss.item() >= 0
    return loss


class Loop:
    """A training loop under the guard."""

    def __init__(self, session: Any, scaler: bool = True) -> None:
        torch.manual_seed(0)
        self.session = session
        self.recorder = session._recorder
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaler)
        self.rested: list[bool] = []
        self.last: list[Any] = []
        self.record = StepRecord()

    def step(self, objective: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.model(x)
            loss = objective(out, y)
        self.scaler.scale(loss).backward()
        self.rested.append(any(isinstance(e, RestedGlue) for e in self.recorder.log.record.events))
        if len(self.rested) >= STEPS:
            self.record = self.recorder.log.slice()
            self.last = shape_of(self.record.events)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def batch(self) -> tuple[Tensor, Tensor]:
        return torch.randn(6, 8), torch.randint(4, (6,))


@pytest.fixture(autouse=True)
def machine_of_any_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resting, "LONG_STEP", 60.0)


def test_long_steps_are_taped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resting, "LONG_STEP", 0.0)
    _, rested = last_step(functional.cross_entropy, tmp_path / "run", scaler=True)
    assert not any(rested)


def shape_of(events: list[Any]) -> list[Any]:
    """What led to the backward call, without numbers: what ran, on what, where."""
    wanted = {events[-1].index}
    for event in reversed(events):
        if event.index in wanted:
            wanted |= {ref.event for ref in refs_in((event.args, event.kwargs))}
    events = [e for e in events if e.index in wanted]
    order = {e.index: number for number, e in enumerate(events)}

    def told(value: Any) -> Any:
        if isinstance(value, Ref):
            return ("made by", order.get(value.event), value.output)
        if isinstance(value, Held):
            return ("held", value.value.tolist())
        if isinstance(value, (list, tuple)):
            return [told(item) for item in value]
        if isinstance(value, dict):
            return {key: told(item) for key, item in value.items()}
        return value

    return [
        (type(e), getattr(e, "func", None), told(e.args), told(e.kwargs), e.line and e.line.number, list(e.floating))
        for e in events
    ]


def last_step(
    objective: Callable[[Tensor, Tensor], Tensor], folder: Path, scaler: bool
) -> tuple[list[Any], list[bool]]:
    with ampguard.watch(out=folder) as session:
        loop = Loop(session, scaler)
        for _ in range(STEPS):
            loop.step(objective, *loop.batch())
        return loop.last, loop.rested


@pytest.mark.parametrize("scaler", [True, False], ids=["scaled", "not scaled"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_was_not_taped_is_told_as_the_tape_would(
    name: str, scaler: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, rested = last_step(OBJECTIVES[name], tmp_path / "rested", scaler)
    assert rested[-1]
    monkeypatch.setattr(resting, "FIRST_LESSON", 10**6)
    taped, rested = last_step(OBJECTIVES[name], tmp_path / "taped", scaler)
    assert not any(rested)
    assert told == taped


@pytest.mark.parametrize("name", TAPED)
def test_what_the_graph_does_not_tell_is_taped(name: str, tmp_path: Path) -> None:
    _, rested = last_step(TAPED[name], tmp_path / "run", scaler=True)
    assert not any(rested)


def log_of_a_share(out: Tensor, y: Tensor) -> Tensor:
    return -torch.log(out.float().softmax(1).gather(1, y[:, None])).mean()


def spread(out: Tensor, y: Tensor) -> Tensor:
    return torch.sqrt(out.float().var(1)).mean() + functional.cross_entropy(out, y)


def flatten(loop: Loop, x: Tensor) -> Tensor:
    """All outputs alike: their spread is 0, and its root has no derivative there."""
    with torch.no_grad():
        for parameter in loop.model[2].parameters():
            parameter.zero_()
    return x


FAILURES: dict[str, tuple[Any, Callable[[Loop, Tensor], Tensor]]] = {
    "loss": (log_of_a_share, lambda loop, x: x * 3e4),
    "gradient": (spread, flatten),
    "given": (functional.cross_entropy, lambda loop, x: x * float("inf")),
}


def told_of(failure: str, folder: Path) -> tuple[Any, bool]:
    objective, spoil = FAILURES[failure]
    with ampguard.watch(out=folder) as session:
        loop = Loop(session)
        for _ in range(STEPS):
            loop.step(objective, *loop.batch())
        x, y = loop.batch()
        loop.step(objective, spoil(loop, x), y)
    incident = session.report.incidents[0]
    assert incident.step == STEPS
    return msgspec.structs.replace(incident, evidence={}), loop.rested[STEPS - 1]


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_is_explained_as_if_it_had_been_taped(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, has_rested = told_of(failure, tmp_path / "rested")
    assert has_rested
    monkeypatch.setattr(resting, "FIRST_LESSON", 10**6)
    taped, has_rested = told_of(failure, tmp_path / "taped")
    assert not has_rested
    assert told == taped
    assert told.op is not None or told.cause == "nonfinite-input"


def test_another_loss_at_the_same_place(tmp_path: Path) -> None:
    """The operators that were learnt are not the ones that ran: nothing is told of them, and the tape goes on again."""
    chosen = [functional.cross_entropy]

    def objective(out: Tensor, y: Tensor) -> Tensor:
        return chosen[0](out, y)

    with ampguard.watch(out=tmp_path / "run") as session:
        loop = Loop(session)
        for _ in range(STEPS):
            loop.step(objective, *loop.batch())
        assert loop.rested[-1]
        chosen[0] = lambda out, y: torch.log(functional.cross_entropy(out, y) * 0).square()
        for _ in range(3):
            loop.step(objective, *loop.batch())
    assert not any(loop.rested[-2:])
    first = session.report.incidents[0]
    assert first.step <= STEPS + 1
    assert first.op == "aten.log.default"


def test_a_graph_of_another_shape_is_not_taken_for_the_known_one(tmp_path: Path) -> None:
    """What the step used is found where it always is, but other operators ran: none is told rather than wrong ones."""
    chosen = [lambda out: out]

    def objective(out: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(chosen[0](out), y)

    with ampguard.watch(out=tmp_path / "run") as session:
        loop = Loop(session)
        for _ in range(STEPS):
            loop.step(objective, *loop.batch())
        assert loop.record.complete
        chosen[0] = torch.abs
        loop.step(objective, *loop.batch())
        assert loop.rested[-1]
        assert not loop.record.complete
        assert not any(isinstance(event, GlueOp) for event in loop.record.events)


class Counting(nn.Module):
    """Begins to count its calls late: from then on a replay needs the count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0
        self.count = 0

    def forward(self, x: Tensor, counts: bool) -> Tensor:
        if counts:
            self.count = self.count + 1
        return self.layer(x + self.count)


def test_usual_calls_are_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usual, "USUAL_CALLS", 8)
    torch.manual_seed(0)
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with ampguard.watch(out=tmp_path / "run") as session:
        for step in range(41):
            loss = model(torch.randn(3, 4), step >= 20).pow(2).mean()
            loss = torch.log(loss * 0 - 1) if step == 40 else loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    incident = session.report.incidents[0]
    assert (incident.step, incident.op, incident.evidence["rung"]) == (40, "aten.log.default", "replay")


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift  # keeps nothing of x for backward


def test_arguments_are_copied_again_once_a_script_writes_to_one(tmp_path: Path) -> None:
    model = Shifted()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with ampguard.watch(out=tmp_path / "run") as session:
        for step in range(41):
            x = torch.full((3, 4), float("inf") if step == 40 else 1.0)
            out = model(x)
            if step >= 20:
                x.zero_()
            optimizer.zero_grad()
            out.pow(2).mean().backward()
            optimizer.step()
    incident = session.report.incidents[0]
    assert (incident.step, incident.evidence["rung"]) == (40, "replay")


def test_validation_is_taped_although_training_rests(tmp_path: Path) -> None:
    with ampguard.watch(out=tmp_path / "run") as session:
        loop = Loop(session)
        for _ in range(STEPS):
            loop.step(functional.cross_entropy, *loop.batch())
        assert loop.rested[-1]
        x, y = loop.batch()
        with torch.no_grad():
            loss = torch.log(functional.cross_entropy(loop.model(x), y) * 0 - 1)
        assert loss.isnan().item()
    incident = session.report.incidents[0]
    assert (incident.mode, incident.op) == ("eval", "aten.log.default")


def test_hooks_that_pack_what_the_graph_keeps_are_left_alone(tmp_path: Path) -> None:
    unpacked = []
    with ampguard.watch(out=tmp_path / "run") as session:
        loop = Loop(session, scaler=False)

        def unpack(tensor: Tensor) -> Tensor:
            unpacked.append(tensor)
            return tensor

        for _ in range(STEPS):
            x, y = loop.batch()
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
                loss = functional.cross_entropy(loop.model(x), y)
            unpacked.clear()
            loop.optimizer.zero_grad()
            loss.backward()
            seen = len(unpacked)
            loop.optimizer.step()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        loss = functional.cross_entropy(loop.model(x), y)
    unpacked.clear()
    loss.backward()
    assert seen == len(unpacked)
