"""Glue that is kept call by call: told, it is what the operator tape would have recorded."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary

import ampguard
from ampguard.capture.events.log import EventLog
from ampguard.capture.events.operands import refs_in
from ampguard.capture.glue import schedule
from ampguard.capture.glue.calltape import CallTape
from ampguard.capture.glue.taped_calls import TapedCall
from ampguard.capture.record import GlueOp, Held, Ref, StepRecord

STEPS = 12
WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 1.0])


def masked(out: Tensor, y: Tensor) -> Tensor:
    kept = out.detach().max(dim=1).values > -100.0
    return functional.cross_entropy(out[kept], y[kept])


def stacked(out: Tensor, y: Tensor) -> Tensor:
    terms = [functional.cross_entropy(part, labels) for part, labels in zip(out.chunk(2), y.chunk(2), strict=True)]
    return torch.stack(terms).mean()


def focal(out: Tensor, y: Tensor) -> Tensor:
    return (1 - torch.exp(-functional.cross_entropy(out, y, reduction="none"))).pow(2).mean()


def spread(out: Tensor, y: Tensor) -> Tensor:
    return torch.sqrt(out.float().var(1)).mean() + functional.cross_entropy(out, y)


OBJECTIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross entropy": functional.cross_entropy,
    "weighted": lambda out, y: functional.cross_entropy(out, y, weight=WEIGHTS),
    "two terms": lambda out, y: functional.cross_entropy(out, y) + 0.1 * out.float().pow(2).mean(),
    "focal": focal,
    "divided": lambda out, y: functional.nll_loss(functional.log_softmax(out, 1), y) / 4,
    "stacked": stacked,
    "masked": masked,
    "of a share": lambda out, y: -out.float().softmax(1).gather(1, y[:, None]).clamp_min(1e-6).log().mean(),
    "contracted": lambda out, y: torch.einsum("bi,bj->bij", out, out).square().mean(),
    "one hot": lambda out, y: (out - functional.one_hot(y, 4)).abs().mean(),
    "constants": lambda out, y: (out * torch.arange(4.0) - torch.tensor([1.0, 2.0, 3.0, 4.0])).square().mean(),
    "spread": spread,
    "mapped": lambda out, y: torch.vmap(lambda row: (row.float() * 2).square().sum())(out).mean(),
}
MORE_THAN_COMPUTE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "random": lambda out, y: functional.cross_entropy(functional.dropout(out, 0.5), y),
    "in place within": lambda out, y: functional.cross_entropy(out, y, label_smoothing=0.1),
    "in place": lambda out, y: functional.cross_entropy(out.clone().mul_(2.0), y),
    "in place later": lambda out, y: _doubled_after(out),
    "hooked": lambda out, y: _hooked(functional.cross_entropy(out, y)),
    "read": lambda out, y: _read(functional.cross_entropy(out, y)),
    "derived": lambda out, y: torch.func.grad(lambda x: x.float().pow(3).sum())(out).float().square().mean(),
}


def _doubled_after(out: Tensor) -> Tensor:
    shifted = out + 1.0
    kept = shifted * 0.5
    shifted.mul_(2.0)
    return (kept + shifted).float().mean()


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
        self.recorder = session._recorder if session is not None else None
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaler)
        self.calls: list[int] = []
        """How many calls were kept as such, by step."""
        self.record = StepRecord()
        self.keeps_record = False

    def step(self, objective: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.model(x)
            loss = objective(out, y)
        self.scaler.scale(loss).backward()
        if self.recorder is not None:
            self._look()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _look(self) -> None:
        self.recorder.tape.leave()  # it may be on behind a backward pass; whoever looks into the record takes it off first
        self.calls.append(sum(type(e) is TapedCall for e in self.recorder.log.record.events))
        if self.keeps_record or len(self.calls) >= STEPS:
            self.record = self.recorder.log.slice()

    def batch(self) -> tuple[Tensor, Tensor]:
        return torch.randn(6, 8), torch.randint(4, (6,))

    def run(self, objective: Callable[[Tensor, Tensor], Tensor], steps: int = STEPS) -> None:
        for _ in range(steps):
            self.step(objective, *self.batch())


@pytest.fixture(autouse=True)
def machine_of_any_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "LONG_STEP", 60.0)
    torch._dynamo.reset()  # where anything is compiled, no function mode is used


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


def last_step(objective: Callable[[Tensor, Tensor], Tensor], folder: Path, scaler: bool) -> tuple[list[Any], int]:
    with ampguard.watch(out=folder) as session:
        loop = Loop(session, scaler)
        loop.run(objective)
    assert loop.record.complete
    return shape_of(loop.record.events), loop.calls[-1]


@pytest.mark.parametrize("scaler", [True, False], ids=["scaled", "not scaled"])
@pytest.mark.parametrize("name", [*OBJECTIVES, *MORE_THAN_COMPUTE])
def test_kept_calls_are_told_as_the_tape_would(
    name: str, scaler: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = (OBJECTIVES | MORE_THAN_COMPUTE)[name]
    told, calls = last_step(objective, tmp_path / "calls", scaler)
    assert calls > 0 or name in MORE_THAN_COMPUTE
    monkeypatch.setattr(schedule, "LONG_STEP", 0.0)
    monkeypatch.setattr(schedule, "MUCH_GLUE", math.inf)
    taped, calls = last_step(objective, tmp_path / "operators", scaler)
    assert calls == 0  # long steps are taped operator by operator
    assert told == taped


def log_of_a_share(out: Tensor, y: Tensor) -> Tensor:
    return -torch.log(out.float().softmax(1).gather(1, y[:, None])).mean()


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


def told_of(failure: str, folder: Path) -> tuple[Any, int]:
    objective, spoil = FAILURES[failure]
    with ampguard.watch(out=folder) as session:
        loop = Loop(session)
        loop.run(objective)
        x, y = loop.batch()
        loop.step(objective, spoil(loop, x), y)
    incident = session.report.incidents[0]
    assert incident.step == STEPS
    return msgspec.structs.replace(incident, evidence={}), loop.calls[STEPS - 1]


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_is_explained_as_if_it_had_been_taped(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, calls = told_of(failure, tmp_path / "calls")
    assert calls > 0
    monkeypatch.setattr(schedule, "LONG_STEP", 0.0)
    monkeypatch.setattr(schedule, "MUCH_GLUE", math.inf)
    taped, calls = told_of(failure, tmp_path / "operators")
    assert calls == 0
    assert told == taped
    assert told.op is not None or told.cause == "nonfinite-input"


def gated(out: Tensor, y: Tensor) -> Tensor:
    p = out.float().softmax(-1)
    gate = (p > 0.999).float()
    return functional.cross_entropy(out, y) + 0.1 * (p.amax(-1) * gate.sum(-1)).sum() / gate.sum()


def test_what_a_script_does_for_the_first_time_in_the_step_that_fails(tmp_path: Path) -> None:
    with ampguard.watch(out=tmp_path / "run") as session:
        loop = Loop(session)
        loop.run(functional.cross_entropy)
        assert loop.calls[-1] > 0
        loop.step(gated, *loop.batch())
    incident = session.report.incidents[0]
    assert (incident.step, incident.cause, incident.op) == (STEPS, "division-by-zero", "aten.div.Tensor")
    assert incident.evidence["rung"] == "replay"


def test_evaluation_is_taped_operator_by_operator(tmp_path: Path) -> None:
    with ampguard.watch(out=tmp_path / "run") as session:
        loop = Loop(session)
        loop.run(functional.cross_entropy)
        x, y = loop.batch()
        with torch.no_grad():
            loss = torch.log(functional.cross_entropy(loop.model(x), y) * 0 - 1)
            assert not any(type(e) is TapedCall for e in loop.recorder.log.record.events[-3:])
        assert loss.isnan().item()
    incident = session.report.incidents[0]
    assert (incident.mode, incident.op) == ("eval", "aten.log.default")


def test_functions_that_computed_nothing_may_yet(tmp_path: Path) -> None:
    """`contiguous` returned what it was given, `grad` nothing, until the step that fails."""
    anchor = torch.zeros(4, requires_grad=True)
    turned = [False]

    def objective(out: Tensor, y: Tensor) -> Tensor:
        rows = (out.T if turned[0] else out).contiguous()
        rows = rows.T if turned[0] else rows
        drift = anchor.grad
        loss = functional.cross_entropy(rows, y)
        return loss if drift is None else loss + torch.log(drift).mean() * rows.mean()

    with ampguard.watch(out=tmp_path / "run") as session:
        loop = Loop(session, scaler=False)
        loop.run(objective)
        assert loop.calls[-1] > 0
        turned[0] = True
        anchor.grad = -torch.ones(4)
        loop.step(objective, *loop.batch())
        assert loop.record.complete
    incident = session.report.incidents[0]
    assert (incident.step, incident.op, incident.evidence["rung"]) == (STEPS, "aten.log.default", "replay")


def test_a_function_that_computed_so_far_and_then_writes(tmp_path: Path) -> None:
    """By name it is told in time; by position it is seen afterwards, and the next time it is taped."""
    place = torch.zeros(6, 4)
    how = [0]

    def objective(out: Tensor, y: Tensor) -> Tensor:
        x = out.float() + 0.5
        if how[0] == 0:
            x = functional.relu(torch.add(x.detach(), 0.0)) + x
        elif how[0] == 1:
            x = functional.relu(torch.add(x.detach(), 0.0, out=place), inplace=True) + x
        else:
            x = functional.relu(torch.add(x.detach(), 0.0), True) + x
        return functional.cross_entropy(x, y)

    with ampguard.watch(out=tmp_path / "run") as session:
        loop = Loop(session, scaler=False)
        loop.run(objective)
        assert loop.calls[-1] > 0
        how[0] = 1
        loop.step(objective, *loop.batch())
        written = [str(e.func) for e in loop.record.events if isinstance(e, GlueOp)]
        assert loop.record.complete
        assert "aten.add.out" in written
        assert "aten.relu_.default" in written
        before = place._version
        loop.recorder.log.slice()
        assert place._version == before
        how[0] = 2
        loop.step(objective, *loop.batch())
        first = loop.record.complete
        loop.step(objective, *loop.batch())
        assert (first, loop.record.complete) == (True, True)  # known as a writer since it wrote by name


def doubled(x: Tensor, write: bool = False) -> Tensor:
    """A library's function that asks function modes first, as PyTorch's own do."""
    if has_torch_function_unary(x):
        return handle_torch_function(doubled, (x,), x, write=write)
    return x.mul_(2.0) if write else x * 2.0


def test_a_function_of_a_library_that_writes_where_it_is_told_to(tmp_path: Path) -> None:
    """Its name for that is not known beforehand: the first time is lost, and said to be; then it is taped."""
    writes = [False]

    def objective(out: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(doubled(out.float() + 0.5, writes[0]), y)

    with ampguard.watch(out=tmp_path / "run") as session:
        loop = Loop(session, scaler=False)
        loop.run(objective)
        assert loop.record.complete
        assert any(e.func is torch.ops.aten.mul.Tensor for e in loop.record.events if isinstance(e, GlueOp))
        writes[0] = True
        complete = []
        for _ in range(2):
            loop.step(objective, *loop.batch())
            complete.append(loop.record.complete)
    assert complete == [False, True]


class Seen(TorchFunctionMode):
    """A function mode of the script's own."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def test_a_function_mode_of_the_script_sees_what_it_saw_before(tmp_path: Path) -> None:
    def seen_by(steps: int, inside: bool) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        functions: list[Any] = []
        for _ in range(steps):
            mode = Seen()
            optimizer.zero_grad()
            out = model(torch.randn(6, 8))
            if inside:
                with mode:
                    loss = functional.cross_entropy(out, torch.zeros(6, dtype=torch.long)).square()
            else:
                with mode:
                    loss = model(torch.randn(6, 8)).square().mean() + out.mean()
            loss.backward()
            optimizer.step()
            functions = mode.functions
        return functions

    for inside in (True, False):
        plain = seen_by(STEPS, inside)
        with ampguard.watch(out=tmp_path / f"run-{inside}"):
            assert seen_by(STEPS, inside) == plain


def test_a_call_that_raises_raises_the_same(tmp_path: Path) -> None:
    with ampguard.watch(out=tmp_path / "run") as session:
        loop = Loop(session)
        loop.run(functional.cross_entropy)
        assert loop.calls[-1] > 0
        out = loop.model(torch.randn(6, 8))
        with pytest.raises(IndexError, match="out of bounds"):
            functional.cross_entropy(out, torch.full((6,), 9))
        loop.run(functional.cross_entropy, 2)
    assert not session.report.incidents


def test_nothing_is_held_on_to_when_a_step_is_over(tmp_path: Path) -> None:
    alive: list[Any] = []

    def objective(out: Tensor, y: Tensor) -> Tensor:
        import weakref

        probabilities = out.float().exp()
        alive.append(weakref.ref(probabilities))
        return probabilities.mean()

    with ampguard.watch(out=tmp_path / "run") as session:
        loop = Loop(session)
        loop.run(objective)
        assert loop.calls[-1] > 0
        assert not [ref for ref in alive if ref() is not None]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_is_not_watched(tmp_path: Path) -> None:
    with ampguard.watch(out=tmp_path / "run") as session:
        loop = Loop(session)
        loop.run(functional.cross_entropy)
        loop.model(torch.randn(6, 8))
        assert torch._C._len_torch_function_stack() == 1
        child = os.fork()
        if not child:
            os._exit(torch._C._len_torch_function_stack())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo asks for it while it traces
def test_compiled_losses_see_no_function_mode(tmp_path: Path) -> None:
    objective = torch.compile(lambda out, y: functional.cross_entropy(out.float() * 2, y), backend="aot_eager")
    with ampguard.watch(out=tmp_path / "run") as session:
        loop = Loop(session)
        loop.run(objective)
    assert not any(loop.calls)
    torch._dynamo.reset()


def _replace_criterion(patch: pytest.MonkeyPatch) -> None:
    original = functional.cross_entropy
    patch.setattr(functional, "cross_entropy", lambda *args, **kwargs: 2.0 * original(*args, **kwargs))


def _replace_in_c(patch: pytest.MonkeyPatch) -> None:
    original = Tensor.mul
    patch.setattr(Tensor, "mul", lambda self, other: original(self, other) + 1.0)


def _replace_in_python(patch: pytest.MonkeyPatch) -> None:
    original = Tensor.norm

    @functools.wraps(original)
    def norm(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return original(self, *args, **kwargs) + 1.0

    patch.setattr(Tensor, "norm", norm)


REPLACEMENTS = {"criterion": _replace_criterion, "in C": _replace_in_c, "in Python": _replace_in_python}


@pytest.mark.parametrize("when", [0, STEPS - 3])
@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_a_function_that_the_script_has_replaced_is_applied_once(
    replacement: str, when: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def objective(out: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(out, y) + out.mul(0.5).float().norm(dim=1).mean()

    def trained(folder: Path | None) -> list[float]:
        losses: list[float] = []

        def noted(out: Tensor, y: Tensor) -> Tensor:
            loss = objective(out, y)
            losses.append(loss.item())
            return loss

        with monkeypatch.context() as patch:
            guard = ampguard.watch(out=folder) if folder is not None else contextlib.nullcontext()
            with guard as session:
                loop = Loop(session, scaler=False)
                for step in range(STEPS):
                    if step == when:
                        REPLACEMENTS[replacement](patch)
                    loop.step(noted, *loop.batch())
        return losses

    assert trained(tmp_path / "run") == trained(None)


READS = {
    "numpy": lambda hits: hits.numpy().mean(),
    "tolist": lambda hits: sum(hits.tolist()),
    "item": lambda hits: hits.mean().item(),
}


@pytest.mark.parametrize("read", READS)
def test_a_script_that_reads_its_metrics_replaces_nothing(read: str, tmp_path: Path) -> None:
    """The guard's own probes of `numpy` and `tolist` are what PyTorch names to a function mode."""
    with ampguard.watch(out=tmp_path / "run") as session:
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in [(torch.randn(6, 8), torch.randint(8, (6,))) for _ in range(STEPS)]:
            out = model(x)
            loss = functional.cross_entropy(out, y)
            READS[read]((out.detach().argmax(1) == y).float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        tape = session._recorder.tape
        assert not tape.calls.met.is_misled
        model(x)
        assert tape.is_of_calls


@pytest.mark.parametrize("is_one_batch", [False, True])
def test_an_ordinary_loop_is_asked_little(is_one_batch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clearing, clipping and metrics ask every parameter for its gradient: that is nobody's glue.

    Targets that were made once, where the tape is on, and are used in each step, are no second loss of a graph.
    """
    asked: list[Any] = []
    original = CallTape.__torch_function__

    def noted(self: Any, func: Any, *rest: Any, **more: Any) -> Any:
        asked.append(func)
        return original(self, func, *rest, **more)

    monkeypatch.setattr(CallTape, "__torch_function__", noted)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)])
    with ampguard.watch(out=tmp_path / "run") as session:
        optimizer = torch.optim.AdamW(model.parameters())
        batches = [(torch.randn(6, 8), torch.randint(8, (6,))) for _ in range(1 if is_one_batch else STEPS)]
        for x, y in batches * (STEPS // len(batches)):
            asked.clear()
            out = model(x)
            loss = functional.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            assert loss.item() + (out.argmax(1) == y).float().mean().item() > 0
        assert not session._recorder.log.goes_on_after_backward
    assert len(asked) <= 8
    assert functional.cross_entropy in session._recorder.tape.calls._plain  # the loss is kept all the same


def test_what_converts_now_and_then_is_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`long` and `float` alternately have nothing to convert; a number is read and a yes or no asked for; a part is taken.

    None of it is taped operator by operator once it is known, and no call that is kept is named for it.
    """
    taped: list[Any] = []
    settled: list[int] = []
    in_loss = [False]
    tape, settle = CallTape._tape, EventLog.settle

    def taping(self: CallTape, func: Any, *rest: Any) -> Any:
        taped.append(func)
        return tape(self, func, *rest)

    def settling(self: EventLog) -> None:
        if in_loss[0]:
            settled.append(len(self._pending.entries))
        settle(self)

    def objective(out: Tensor, y: Tensor) -> Tensor:
        in_loss[0] = True
        actions = y.float().float().long().long()
        if not (actions >= 0).all() or math.isnan(float(out.detach().mean())):
            raise ValueError
        loss = functional.cross_entropy(out[..., :], actions)
        in_loss[0] = False
        return loss

    monkeypatch.setattr(CallTape, "_tape", taping)
    monkeypatch.setattr(EventLog, "settle", settling)
    with ampguard.watch(out=tmp_path / "run") as session:
        loop = Loop(session, scaler=False)
        loop.run(objective)
        batch = loop.batch()
        taped.clear()
        settled.clear()
        loop.step(objective, *batch)
    assert taped == []
    assert settled == []


def test_a_second_loss_of_the_same_graph_is_followed(tmp_path: Path) -> None:
    with ampguard.watch(out=tmp_path / "run") as session:
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(STEPS):
            out = model(torch.randn(6, 8))
            optimizer.zero_grad()
            out.square().mean().backward(retain_graph=True)
            (torch.log(out.mean() * 0 - 1) if step == STEPS - 1 else out.abs().mean()).backward()
            optimizer.step()
        assert session._recorder.log.goes_on_after_backward
    incident = session.report.incidents[0]
    assert (incident.step, incident.op) == (STEPS - 1, "aten.log.default")
