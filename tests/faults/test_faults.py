"""A fault in ampguard never ends or changes a training: it is said once, and the guard steps aside.

Each test puts an exception into one entry of one room, runs a training in which steps fail, and compares its end bit for
bit with that of a training without a guard.
"""

from __future__ import annotations

import errno
import json
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import LOOPS
from torch import nn
from watching import Watched, bits, seed_everything, watched

import ampguard
from ampguard.capture import barrier, loaded, recorder, steps
from ampguard.capture.backward_calls import BackwardCalls
from ampguard.capture.barrier import FaultBarrier
from ampguard.capture.events import log, producers
from ampguard.capture.glue import schedule, tape
from ampguard.capture.glue.functions import AppliedFunctions
from ampguard.capture.glue.taped_preprocessing import TapedPreprocessing
from ampguard.capture.gradients import GradientWatch
from ampguard.capture.judging import judge, outputs
from ampguard.capture.judging.carried import CarriedState
from ampguard.capture.judging.spoilt import SpoiltGradients
from ampguard.capture.probing import loading
from ampguard.capture.probing.clipping import ClippingProbe
from ampguard.capture.root_calls import buffers, pace, surroundings
from ampguard.capture.root_calls.resting import RestingCalls
from ampguard.capture.scaling import LossScaling
from ampguard.capture.turns import Turns
from ampguard.diagnose import causes, evidence, finding, investigate
from ampguard.diagnose.cases import casebook, examiner
from ampguard.diagnose.finding import RULES
from ampguard.diagnose.fixes import minimal, trying
from ampguard.diagnose.locate import finding_place, locating
from ampguard.errors import StopRun
from ampguard.replay import live, rebuild, sandbox, tracer, writer
from ampguard.report import store, terminal
from ampguard.run import session

causes.load()


class InjectedError(Exception):
    """Not one that any room expects."""


def raises(*args: Any, **kwargs: Any) -> Any:
    raise InjectedError("injected")


@pytest.fixture(scope="module")
def plain() -> dict[str, dict[str, Any]]:
    return {name: loop() for name, loop in LOOPS.items()}


@pytest.fixture
def guard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Watched]:
    return lambda body, **options: watched(body, tmp_path / "run", capsys, **options)


def differing(result: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """What a run has left behind that another has not."""
    return [key for key in plain if result[key] != plain[key]]


def assert_unharmed(run: Watched, plain: dict[str, Any]) -> None:
    assert differing(run.result, plain) == []
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()
    assert not torch.is_inference_mode_enabled()
    assert nn.Module.__call__.__module__.startswith("torch")


# --- every entry of the recorder that a probe calls ------------------------------------------------------------------

Recorder = recorder.FlightRecorder
CALLED_BY_PROBES = [
    (Recorder, "enter_root"),
    (Recorder, "leave_root"),
    (TapedPreprocessing, "bookkeeping_done"),
    (TapedPreprocessing, "optimizer_made"),
    (LossScaling, "note"),
    (Recorder, "before_backward"),
    (Recorder, "after_backward"),
    (Recorder, "before_update"),
    (Recorder, "gradients_cleared"),
    (Recorder, "after_update"),
    (log.EventLog, "add_operator"),
    (log.EventLog, "keep_plain"),
    (log.EventLog, "add_results"),
    (producers.Producers, "add_views"),
    (log.EventLog, "lookup"),
    (log.EventLog, "forget_finished"),
    (judge.Judge, "read"),
    (judge.Judge, "settle"),
    (judge.Judge, "settle_all"),
    (judge.Judge, "is_healthy"),
    (judge.Judge, "judge_losses"),
    (steps.StepCounter, "created"),
    (steps.StepCounter, "attempted"),
    (steps.StepCounter, "behind"),
    (buffers.BufferWatch, "before_call"),
    (buffers.BufferWatch, "after_call"),
    (tape.GlueTape, "enter"),
    (tape.GlueTape, "leave"),
    (surroundings.RandomStreams, "before_call"),
    (log, "user_line"),
    (recorder, "map_tensors"),
    (recorder, "current_modes"),
    (judge, "is_finite"),
]


@pytest.mark.parametrize("after", [0, 7], ids=["at once", "later"])
@pytest.mark.parametrize(("owner", "name"), CALLED_BY_PROBES, ids=lambda value: getattr(value, "__name__", value))
def test_capture(
    owner: Any,
    name: str,
    after: int,
    guard: Callable[..., Watched],
    plain: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = getattr(owner, name)
    calls = []

    def fails_in_time(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) > after:
            raise InjectedError(name)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, fails_in_time)
    loop = "without_scaler" if name in ("read",) else "with_scaler"

    run = guard(LOOPS[loop])

    assert_unharmed(run, plain[loop])
    if len(calls) > after:
        assert run.faults == 1, run.stderr
        assert f"InjectedError: {name}" in run.stderr
    else:
        assert run.faults == 0
    if after == 0 and name in ("enter_root", "leave_root", "before_backward", "after_backward", "after_update"):
        assert calls, "the loop must come by here for this test to mean anything"


@pytest.mark.parametrize(
    ("owner", "name"), [(outputs.OutputJudge, "count"), (Recorder, "before_backward"), (Recorder, "enter_root")]
)
def test_capture_once_the_investigations_are_used_up(
    owner: Any, name: str, guard: Callable[..., Watched], plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, raises)
    run = guard(LOOPS["with_evaluation"], max_incidents=0)
    assert_unharmed(run, plain["with_evaluation"])
    assert run.faults <= 1


@pytest.mark.parametrize(("owner", "name"), [(Recorder, "before_backward"), (log.EventLog, "add_operator")])
def test_nothing_of_the_guard_is_on_the_stack_after_a_fault(
    owner: Any, name: str, guard: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard says that it is off: then the script must run at full speed again."""
    model = nn.Linear(2, 1)

    def body() -> int:
        for step in range(4):
            if step == 2:
                monkeypatch.setattr(owner, name, raises)
            (model(torch.ones(3, 2)) * 2.0).mean().backward()
        return torch._C._len_torch_dispatch_stack()

    run = guard(body)
    assert run.faults == 1
    assert run.result == 0


RARER = [
    (BackwardCalls, "returned"),
    (AppliedFunctions, "enter"),
    (AppliedFunctions, "leave"),
    (TapedPreprocessing, "note_batch"),
    (TapedPreprocessing, "evaluation_begins"),
    (CarriedState, "iteration_ends"),
    (CarriedState, "step_begins"),
    (Recorder, "closure_ended"),
    (judge.Judge, "read_array"),
    (Recorder, "root_raised"),
    (Recorder, "glue_raised"),
    (Recorder, "resume_tape"),
    (Recorder, "tape_exhausted"),
    (RestingCalls, "enter"),
    (RestingCalls, "look_at"),
    (RestingCalls, "look_at_error"),
    (tape.GlueTape, "begins_dual_level"),
    (ClippingProbe, "_was_measured"),
    (GradientWatch, "found_finite"),
]


@pytest.mark.parametrize(("owner", "name"), RARER, ids=lambda value: getattr(value, "__name__", value))
def test_capture_on_rarer_ways(
    owner: Any, name: str, guard: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refuses(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("the script's own")

    def body() -> Any:
        seed_everything()
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.no_grad():
            for _ in range(3):
                model(torch.randn(2, 3))
            if name == "look_at_error":
                with pytest.raises(KeyError, match="the script's own"):
                    Refuses()(torch.randn(2, 3))
        for x in torch.utils.data.DataLoader(torch.randn(8, 3), batch_size=2):
            with pytest.raises(KeyError, match="the script's own"):
                Refuses()(x)
            out = model(x)
            with pytest.raises(RuntimeError, match="without overflow") if name == "glue_raised" else nullcontext():
                out.half().masked_fill(out > -100, -1e9 if name == "glue_raised" else 0.0)
            out = sum((out * 1.0 for _ in range(5000)), out) if name == "tape_exhausted" else out
            (g,) = torch.autograd.grad(out.sum(), model.weight, create_graph=True, retain_graph=True)
            optimizer.zero_grad()
            (Doubled.apply(out).pow(2).mean() + g.sum() * 0).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step((lambda: 0.0) if name == "closure_ended" else None)
            out.detach().tolist()
        model.eval()
        if name == "begins_dual_level":
            torch.func.jvp(torch.sin, (torch.ones(2),), (torch.ones(2),))
        return bits(list(model.parameters()))

    if owner is RestingCalls:
        monkeypatch.setattr(pace, "FREE_SECONDS", 0.0)
        monkeypatch.setattr(pace, "SHARE", 0.0)

    if name == "tape_exhausted":  # a short run's steps are all taped whole
        monkeypatch.setattr(schedule, "FREE_SECONDS", 0.0)

    expected = body()
    called = []

    def fails(*args: Any, **kwargs: Any) -> Any:
        called.append(name)
        raise InjectedError(name)

    monkeypatch.setattr(owner, name, fails)
    run = guard(body)
    assert called
    assert run.result == expected
    assert run.faults == 1
    assert called == [name], "after a fault the guard is off"


@pytest.mark.parametrize("name", ["note", "versions"])
def test_loading_weights(name: str, guard: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> Any:
        seed_everything()
        model = nn.Linear(3, 1)
        model.load_state_dict({key: value * 2 for key, value in model.state_dict().items()})
        model(torch.randn(2, 3)).mean().backward()
        return bits(list(model.parameters()))

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise InjectedError(name)

    expected = body()
    owner = loading if name == "versions" else loaded.LoadedWeights
    monkeypatch.setattr(owner, name, fails)
    run = guard(body)
    assert run.result == expected
    assert run.faults == 1, run.stderr


# --- replay and diagnose -----------------------------------------------------------------------------------------------

INVESTIGATION = [
    (rebuild.Replayer, "__init__"),
    (rebuild.Replayer, "run"),
    (rebuild, "run_root"),
    (rebuild.Replayer, "_run_glue"),
    (sandbox.ModuleSandbox, "enter"),
    (writer, "bad_elements"),
    (writer, "traced"),
    (tracer.ReplayMode, "call_module"),
    (locating, "chain_from"),
    (investigate, "find_cause"),
    (investigate, "incident_of"),
    (investigate, "verified_fixes"),
    (finding_place, "locate"),
    (finding_place, "with_what_made_it"),
    (examiner, "explain"),
    (examiner, "place_of"),
    (examiner.Examiner, "_examine"),
    (casebook.Casebook, "open"),
    (evidence, "stats"),
    (evidence, "contributing"),
    (evidence, "converted"),
    (terminal, "print_incident"),
    (session.Session, "on_bad"),
    (session.Session, "on_step"),
    (session.Session, "on_forward"),
]


@pytest.mark.parametrize(
    ("owner", "name"),
    INVESTIGATION,
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.parametrize("loop", ["with_scaler", "gan"])
def test_investigation(
    owner: Any,
    name: str,
    loop: str,
    guard: Callable[..., Watched],
    plain: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, raises)

    run = guard(LOOPS[loop])

    assert_unharmed(run, plain[loop])
    assert run.faults == 1 or run.report.incidents, "said, or survived"
    assert run.faults <= 1
    assert run.stderr.count("injected") <= 2


@pytest.mark.parametrize("owner", [minimal, trying], ids=["minimal", "trying"])
def test_fault_in_the_search_for_a_region_costs_that_fix_only(
    owner: Any, guard: Callable[..., Watched], plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if owner is minimal:
        monkeypatch.setattr(minimal, "region_of", raises)
    else:
        monkeypatch.setattr(trying, "smallest_float32_region", raises)
    run = guard(LOOPS["with_scaler"])
    assert_unharmed(run, plain["with_scaler"])
    assert run.faults == 0
    verified = {fix.action: fix.verified for fix in run.first.fixes}
    assert verified["force-fp32"] is None
    assert verified["disable-amp"] is True


@pytest.mark.parametrize("code", sorted(RULES))
def test_cause_rule(
    code: str, guard: Callable[..., Watched], plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RULES, code, raises)
    if "forward" in finding.PHASES[code]:
        run = guard(LOOPS["with_scaler"])
        assert_unharmed(run, plain["with_scaler"])
    else:
        run = guard(differentiates_a_root_at_zero)
        assert run.result == differentiates_a_root_at_zero()
    assert run.faults == 1


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def differentiates_a_root_at_zero() -> Any:
    """A finite loss whose gradient is NaN."""
    torch.manual_seed(0)
    layer = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        layer(torch.zeros(1, 2) if step == 1 else torch.ones(1, 2)).pow(2).sum().sqrt().backward()
        optimizer.step()
    return bits(layer.weight)


def test_rule_that_answers_nonsense(
    guard: Callable[..., Watched], plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RULES, "fp16-overflow", lambda evidence: 42)  # type: ignore[arg-type, return-value]
    run = guard(LOOPS["with_scaler"])
    assert_unharmed(run, plain["with_scaler"])
    assert run.faults == 1


def test_fault_in_live_tracing(guard: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch) -> None:
    """The one room that is on the stack while the step itself runs."""
    seed_everything()
    model = nn.Linear(2, 1)
    model.forward = lambda rows: model.weight.sum() * torch.stack(list(rows)).mean() / 0.0  # type: ignore[method-assign]

    def body() -> Any:
        for _ in range(3):
            model(row for row in torch.ones(3, 2)).backward()
        return bits([p.grad for p in model.parameters() if p.grad is not None])

    expected = body()
    model.zero_grad()
    monkeypatch.setattr(live.LiveTracing, "begin_step", raises)
    run = guard(body)
    assert run.result == expected
    assert run.faults == 1


@pytest.mark.parametrize(("room", "name"), [(writer, "bad_elements"), (writer, "traced"), (tracer, "facts_of")])
def test_fault_while_the_step_is_traced_live(
    room: Any, name: str, guard: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 1)
    model.forward = lambda rows: model.weight.sum() * torch.stack(list(rows)).mean() / 0.0  # type: ignore[method-assign]

    def body() -> Any:
        for _ in range(3):
            model(row for row in torch.ones(3, 2)).backward()
        return True

    monkeypatch.setattr(room, name, raises)
    run = guard(body)
    assert run.result is True
    assert run.faults == 1


# --- the report ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (examiner.Examiner, "close"),
        (recorder.FlightRecorder, "flush"),
        *[
            (owner, name)
            for owner, name in [
                (session.Session, "_make_report"),
                (session, "print_summary"),
                (session, "status_of"),
                (casebook.Casebook, "incidents"),
                (store, "to_json"),
            ]
        ],
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_end_of_the_run(
    owner: Any,
    name: str,
    tmp_path: Path,
    plain: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The script has ended: whatever goes wrong with the report, nothing is raised at the script."""
    monkeypatch.setattr(owner, name, raises)
    result: Any = None
    with ampguard.watch(out=tmp_path / "run"):
        result = LOOPS["with_scaler"]()
    assert differing(result, plain["with_scaler"]) == []
    assert "ampguard:" in capsys.readouterr().err
    assert nn.Module.__call__.__module__.startswith("torch")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO], ids=errno.errorcode.get)
def test_disk_that_cannot_be_written(
    number: int, guard: Callable[..., Watched], plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(store.os, "fsync", full)
    run = guard(LOOPS["with_scaler"])
    assert_unharmed(run, plain["with_scaler"])
    assert run.faults == 0
    assert run.stderr.count("could not be written") == 1
    assert ("the disk is full" in run.stderr) == (number == errno.ENOSPC)
    assert "fp16-overflow" in run.stderr, "what was learnt is on the terminal"
    assert run.report.incidents


def test_run_folder_that_disappears(tmp_path: Path, plain: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    import shutil

    def body() -> Any:
        (tmp_path / "run").rename(tmp_path / "gone")  # at once: the guard may be writing in there
        (tmp_path / "run").write_text("a file now")
        shutil.rmtree(tmp_path / "gone", ignore_errors=True)
        return LOOPS["with_scaler"]()

    run = watched(body, tmp_path / "run", capsys)
    assert_unharmed(run, plain["with_scaler"])
    assert "could not be written" in run.stderr


def test_report_after_a_fault_holds_what_was_learnt(
    guard: Callable[..., Watched], plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original = Recorder.after_update
    count = []

    def fails_late(*args: Any) -> None:
        count.append(1)
        if len(count) > 5:
            raise InjectedError("late")
        original(*args)

    monkeypatch.setattr(Recorder, "after_update", fails_late)
    run = guard(LOOPS["with_scaler"])
    assert_unharmed(run, plain["with_scaler"])
    assert run.faults == 1
    assert run.causes == ["fp16-overflow"]
    stored = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [i["cause"] for i in stored["incidents"]] == ["fp16-overflow"]


def test_closed_terminal(
    tmp_path: Path, plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """stderr is a pipe whose reader is gone."""

    class Gone:
        encoding = "utf-8"

        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

        def flush(self) -> None:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

        def isatty(self) -> bool:
            return False

    with monkeypatch.context() as context:
        context.setattr("sys.stderr", Gone())
        with ampguard.watch(out=tmp_path / "run"):
            result = LOOPS["with_scaler"]()
    assert differing(result, plain["with_scaler"]) == []


# --- the barrier alone ------------------------------------------------------------------------------------------------------


class TestBarrier:
    """What goes through, what stays inside."""

    @pytest.fixture
    def told(self) -> list[Exception]:
        return []

    def test_result_passes(self, told: list[Exception]) -> None:
        assert FaultBarrier(told.append).call(max, 1, 2) == 2
        assert told == []

    @pytest.mark.parametrize(
        "error", [ValueError(), RecursionError(), MemoryError(), OSError(), AssertionError()], ids=repr
    )
    def test_fault_is_told_once_and_nothing_is_called_after_it(self, error: Exception, told: list[Exception]) -> None:
        guard, calls = FaultBarrier(told.append), []

        def fails() -> None:
            calls.append(1)
            raise error

        assert guard.call(fails) is None
        assert guard.call(fails) is None
        assert told == [error]
        assert calls == [1]
        assert guard.tripped

    @pytest.mark.parametrize("error", [StopRun("enough", 0), KeyboardInterrupt(), SystemExit(2)], ids=repr)
    def test_what_ends_a_run_passes(self, error: BaseException, told: list[Exception]) -> None:
        def ends() -> None:
            raise error

        with pytest.raises(type(error)):
            FaultBarrier(told.append).call(ends)
        assert told == []

    def test_fault_in_telling_the_fault(self) -> None:
        assert barrier.FaultBarrier(raises).call(raises) is None


def test_fault_where_a_backward_pass_raises(guard: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise InjectedError("raised")

    def body() -> None:
        model = nn.Linear(3, 1)
        with torch.autograd.detect_anomaly(check_nan=True), pytest.raises(RuntimeError, match="nan values"):
            (model(torch.ones(2, 3)).sum() * 0).sqrt().mul(0).backward()

    monkeypatch.setattr(GradientWatch, "raised", fails)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says that anomaly detection is slow, and where the forward call was
        run = guard(body)
    assert run.faults == 1


def test_fault_where_bad_gradients_are_cleared(guard: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> None:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        for scale in (float("inf"), 1.0, 1.0):
            optimizer.zero_grad(set_to_none=False)
            (scaler.scale(model(torch.ones(2, 3)).sum()) * scale).backward()
            scaler.step(optimizer)
            scaler.update()

    monkeypatch.setattr(SpoiltGradients, "forget_the_cleared", raises)
    assert guard(body).faults == 1


@pytest.mark.parametrize("entry", ["takes_over", "follows"])
def test_fault_where_another_thread_may_be_followed(
    guard: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    def body() -> list[float]:
        model, answers = nn.Linear(3, 1).requires_grad_(entry == "follows"), []
        model(torch.ones(2, 3))

        def serve() -> None:
            answer = model(torch.ones(2, 3)).sum()
            if answer.requires_grad:
                answer.backward()
            answers.append(answer.item())

        server = threading.Thread(target=serve)
        server.start()
        server.join()
        return answers

    monkeypatch.setattr(Turns, entry, raises)
    run = guard(body)
    assert run.faults == 1
    assert len(run.result) == 1


def test_fault_where_an_engine_leaves_a_step_out(
    guard: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    def body() -> float:
        seed_everything()
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp = ampguard.Amp(model, optimizer, precision="bf16", on_nonfinite="skip")
        for factor in (1.0, float("nan"), 1.0):
            with amp.autocast():
                loss = model(torch.ones(2, 3)).float().sum() * factor
            amp.backward(loss)
            amp.step()
        return float(model.weight.detach().sum())

    bare = body()
    monkeypatch.setattr(GradientWatch, "held_off_unscaled", raises)
    run = guard(body)
    assert run.faults == 1
    assert run.result == bare


def test_fault_of_what_waits_for_weights(guard: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> float:
        seed_everything()
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        return float(model.weight.detach().sum())

    def waits(flight: Recorder, *args: Any) -> None:
        made(flight, *args)
        flight.on_weights_change = raises

    bare, made = body(), Recorder.__init__
    monkeypatch.setattr(Recorder, "__init__", waits)
    run = guard(body)
    assert run.faults == 1
    assert run.result == bare


def test_a_run_that_the_guard_did_not_see_to_its_end_is_not_clean(
    guard: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    def body() -> None:
        seed_everything()
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            if step == 3:
                monkeypatch.setattr(log.EventLog, "named_argument", raises)
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 1
    assert (run.report.status, run.report.off_since_step, run.report.incidents) == ("incidents", 3, ())
    assert "3 steps, no incident until the guard went off in step 3; nothing after that was watched" in run.stderr


def test_every_entry_that_probes_call_is_tested() -> None:
    """The list above is compared with what the probes and the tape really call through the barrier."""
    import inspect
    import re
    from pathlib import Path

    from ampguard.capture import probing

    files = Path(probing.__path__[0]).glob("*.py")
    text = "".join(file.read_text() for file in files) + inspect.getsource(tape)
    who = r"(?:recorder|taped|log|turns|resting)"
    called = r"(?:guarded|barrier\.call)\(\s*(?:self\._)?" + who + r"\.(?:\w+\.)*(\w+)"
    entries = set(re.findall(called, text))
    tested = {name for _, name in (*CALLED_BY_PROBES, *RARER)}
    of_threads = {"takes_over", "follows"}
    of_loading = {"note"}
    before_training = {"end"}
    covered_elsewhere = {"count", "raised", "forget_the_cleared", "held_off_unscaled", "on_weights_change"}
    covered_elsewhere |= of_loading | of_threads | before_training
    assert len(entries) > 8
    assert entries - tested - covered_elsewhere == set()
    assert finding.RULES
