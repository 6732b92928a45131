"""While a CUDA graph is captured the guard stays out, and what its replays do is neither a fault nor a breach."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from emulated_graphs import LOST, REFUSED, EmulatedGraph, device_graphs
from graph_loops import (
    Gated,
    Sensors,
    batch,
    by_hand,
    forward_and_backward,
    graph_inside,
    graphed_callables,
    whole_step,
)
from graph_styles import STYLES
from torch import nn
from watching import LateFlag, bits, fingerprint, watched

import ampguard
from ampguard.capture import barrier, graph_captures, recorder
from ampguard.capture.judging import judge
from ampguard.errors import StopRun
from ampguard.run.overrides.asked import Overrides
from ampguard.run.session import RunOptions, Session

__all__ = ["device_graphs"]

pytestmark = pytest.mark.usefixtures("device_graphs")

LOOPS: dict[str, tuple[Callable[..., Any], int]] = {
    "scaler outside": (forward_and_backward, 3 + 24),
    "no steps in the warm-up": (lambda: forward_and_backward(warm_up_steps=False), 24),
    "no warm-up": (lambda: forward_and_backward(warm_up=0), 24),
    "whole step": (whole_step, 4 + 24),
    "callables": (graphed_callables, 24),
    "by hand": (by_hand, 2 + 24),
}


@contextlib.contextmanager
def counted_replays() -> Iterator[list[int]]:
    """One number for each replay."""
    replays: list[int] = []
    original = EmulatedGraph.replay

    def replay(self: EmulatedGraph) -> None:
        replays.append(1)
        original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmulatedGraph, "replay", replay)
        yield replays


@pytest.mark.parametrize("name", LOOPS)
def test_loop_is_as_if_unwatched(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop, steps = LOOPS[name]
    plain, plain_losses, plain_scale = loop()
    run = watched(loop, tmp_path / "run", capsys)
    model, losses, scale = run.result
    assert run.faults == 0
    assert fingerprint(model) == fingerprint(plain)
    assert (losses, scale) == (plain_losses, plain_scale)
    assert all(loss == loss for loss in losses)
    assert run.causes == []
    assert run.report.steps == steps


@pytest.mark.parametrize(("style", "warm_up"), STYLES)
def test_style_is_healthy(
    style: Callable[[int], nn.Module], warm_up: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = style(34)
    run = watched(lambda: style(34), tmp_path / "run", capsys)
    assert run.faults == 0
    assert fingerprint(run.result) == fingerprint(plain)
    assert run.causes == []
    assert run.report.steps == warm_up + 34


def test_graph_that_a_model_replays_is_never_replayed_by_us(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would write over what the model has returned."""

    def spoil(step: int, x: torch.Tensor) -> None:
        if step == 10:
            x[3] = 0.5

    plain, plain_losses, _ = graph_inside(spoil=spoil)
    with counted_replays() as replays:
        run = watched(lambda: graph_inside(spoil=spoil), tmp_path / "run", capsys)
    model, losses, _ = run.result
    assert len(replays) == 24
    assert (fingerprint(model), repr(losses)) == (fingerprint(plain), repr(plain_losses))
    assert run.faults == 0
    assert "a CUDA graph" in "".join(incident.explanation + str(incident.evidence) for incident in run.report.incidents)


def test_stand_in_trains_as_without_a_graph() -> None:
    """The truth about the emulation: a graphed step computes what the same step computes eagerly."""
    model, losses, _ = by_hand()
    torch.manual_seed(3)
    eager = Sensors()
    opt = torch.optim.SGD(eager.parameters(), lr=0.02)
    expected = []
    for step in (0, 0, *range(24)):
        x, y = batch(step)
        opt.zero_grad(set_to_none=True)
        loss = F.cross_entropy(eager(x), y)
        loss.backward()
        if len(expected) >= 2:
            nn.utils.clip_grad_norm_(eager.parameters(), 1.0)
        opt.step()
        expected.append(loss.item())
    assert losses == expected[2:]
    assert bits(dict(model.state_dict())) == bits(dict(eager.state_dict()))


@pytest.mark.parametrize(
    "wait",
    [lambda x: x.sum().item(), lambda x: torch.cuda.synchronize(), lambda x: x.nonzero(), lambda x: bool(x[0, 0] > 0)],
)
def test_stand_in_refuses_what_waits(wait: Callable[[torch.Tensor], Any]) -> None:
    x, graph = torch.ones(2, 2), EmulatedGraph()
    graph.capture_begin()
    with pytest.raises(RuntimeError, match=REFUSED):
        wait(x)
    with pytest.raises(RuntimeError, match=LOST):
        x + 1
    with pytest.raises(RuntimeError, match=LOST):
        graph.capture_end()
    assert float((x + 1).sum()) == 8.0


def test_stand_in_computes_nothing_until_the_replay() -> None:
    x, graph = torch.ones(3), EmulatedGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        x.add_(1.0)
    assert (x.tolist(), x._version) == ([1.0] * 3, 1)
    assert bool(y.isnan().all())
    graph.replay()
    assert (y.tolist(), x.tolist(), x._version) == ([2.0] * 3, [2.0] * 3, 1)


def test_guard_is_silent_from_the_beginning_to_the_end_of_a_capture(tmp_path: Path) -> None:
    heard: list[str] = []
    with ampguard.watch(out=tmp_path / "run") as session:
        model, x = Sensors(), batch(0)[0]
        model(x).sum().backward()
        guard, graph = session._recorder, torch.cuda.CUDAGraph()
        assert guard.active
        with torch.cuda.graph(graph):
            assert not guard.active
            guard.barrier.call(heard.append, "call")
            guard.barrier.note(heard.append, "note")
            elsewhere = threading.Thread(target=guard.barrier.call, args=(heard.append, "from another thread"))
            elsewhere.start()
            elsewhere.join()
            before = guard.log.next_index
            model(x).sum().backward()
            assert guard.log.next_index == before
        assert guard.active
        guard.barrier.call(heard.append, "after")
    assert heard == ["after"]
    assert torch.cuda.CUDAGraph.capture_begin is EmulatedGraph.__dict__["capture_begin"]
    assert EmulatedGraph.capture_begin.__module__ == EmulatedGraph.__module__


def test_guard_is_back_after_a_capture_that_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        model, x = Sensors(), batch(0)[0]
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        with pytest.raises(RuntimeError, match=LOST), torch.cuda.graph(torch.cuda.CUDAGraph()):
            model(x).sum().item()
        x[0] = 1.0
        for _ in range(2):
            opt.zero_grad()
            model(x).mean().backward()
            opt.step()

    run = watched(body, tmp_path / "run", capsys)
    assert run.faults == 0
    assert run.causes[:1] == ["division-by-zero"]
    assert not barrier.captures_underway


def test_a_guard_that_ends_amid_a_capture_leaves_no_silence(tmp_path: Path) -> None:
    graph = torch.cuda.CUDAGraph()
    with ampguard.watch(out=tmp_path / "run"):
        graph.capture_begin()
    graph.capture_end()
    assert not barrier.captures_underway


def test_capture_that_nobody_began_is_noticed_and_its_end_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a C++ library, say: the stream is asked at the next call of a module."""
    is_on = False
    asked: list[bool] = []
    read_flags = judge.Judge.read_flags

    def asking(self: judge.Judge, wait: bool, is_end: bool = False) -> None:
        if is_on:
            asked.append(wait)
        read_flags(self, wait, is_end)

    monkeypatch.setattr(judge.Judge, "read_flags", asking)
    for module in (recorder, graph_captures):
        monkeypatch.setattr(module, "is_capturing", lambda: is_on)
    monkeypatch.setattr(recorder, "HAS_CUDA", True)
    with ampguard.watch(out=tmp_path / "run") as session:
        model, x = Sensors(), batch(0)[0]
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        is_on = True
        loss = model(x).sum()
        assert not session._recorder.active
        is_on = False
        assert not asked
        loss.backward()
        opt.step()
        assert session._recorder.active
        opt.zero_grad()
        model(x).sum().backward()
        opt.step()
    assert session.report is not None
    assert session.report.incidents == ()


@pytest.mark.parametrize("asked", [Overrides("bf16"), Overrides(force_fp32=("*",))])
def test_what_the_user_asked_to_change_is_changed_in_captures_too(asked: Overrides, tmp_path: Path) -> None:
    seen: list[torch.dtype] = []
    session = Session(RunOptions(out=tmp_path / "run", overrides=asked))
    session.start()
    try:
        model, x = nn.Sequential(nn.Linear(16, 4)), batch(0)[0]
        for capture in (contextlib.nullcontext(), torch.cuda.graph(torch.cuda.CUDAGraph())):
            with capture, torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
                seen.append(model(x).dtype)
    finally:
        session.finish()
    assert seen[0] == seen[1]
    assert seen[0] is (torch.bfloat16 if asked.precision == "bf16" else torch.float32)


def test_loss_of_a_replay_is_never_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a device its flag comes late: the script queues the next replay, and so must the guard."""
    waited: list[str] = []
    has_ended = False

    class Noting(LateFlag):
        def is_set(self) -> bool:
            waited.append("end" if has_ended else "training")
            return super().is_set()

    def body() -> None:
        nonlocal has_ended
        monkeypatch.setattr(judge.Judge, "is_healthy", lambda self, losses: False)
        monkeypatch.setattr(judge, "FiniteFlag", Noting)
        whole_step(8)
        has_ended = True

    run = watched(body, tmp_path / "run", capsys)
    assert run.faults == 0
    assert waited == ["training"] * 4 + ["end"] * 8  # the steps of the warm-up are judged before their updates


def test_modules_run_without_their_graphs_in_an_investigation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def spoil(step: int, x: torch.Tensor) -> None:
        if step == 10:
            x[3] = 3e38

    plain, plain_losses, plain_scale = graphed_callables(spoil=spoil)
    with counted_replays() as replays:
        run = watched(lambda: graphed_callables(spoil=spoil), tmp_path / "run", capsys)
    model, losses, scale = run.result
    assert isinstance(model, Gated)
    assert len(replays) == 24 * 4  # two modules, forward and backward: none of them ours
    assert (fingerprint(model), repr(losses), scale) == (fingerprint(plain), repr(plain_losses), plain_scale)
    assert run.first.step == 10
    assert run.first.module == "lower.0"
    assert run.report.steps == 24


@pytest.mark.parametrize("warm_up_steps", [True, False])
def test_no_pass_of_the_warm_up_is_held_on_to(
    warm_up_steps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd adds up gradients on the stream where it first did, as long as anything of that pass is there."""
    nodes: list[weakref.ref[Any]] = []
    alive: list[int] = []
    cross_entropy, begin = F.cross_entropy, EmulatedGraph.capture_begin

    def noting(*args: Any) -> torch.Tensor:
        loss = cross_entropy(*args)
        assert loss.grad_fn is not None
        loss.grad_fn.metadata["alive"] = token = nn.Module()
        nodes.append(weakref.ref(token))
        return loss

    def capture_begin(self: EmulatedGraph, *args: Any, **kwargs: Any) -> None:
        alive.append(sum(ref() is not None for ref in nodes))
        begin(self, *args, **kwargs)

    monkeypatch.setattr(F, "cross_entropy", noting)
    monkeypatch.setattr(EmulatedGraph, "capture_begin", capture_begin)
    forward_and_backward(4, warm_up_steps=warm_up_steps)
    monkeypatch.setattr(judge.Judge, "is_healthy", lambda self, losses: False)
    monkeypatch.setattr(judge, "FiniteFlag", LateFlag)
    with ampguard.watch(out=tmp_path / "run"):
        forward_and_backward(4, warm_up_steps=warm_up_steps)
    assert alive == [0, 0]


@pytest.mark.parametrize("loop", [whole_step, forward_and_backward])
def test_steps_of_replays_are_counted_and_kept(loop: Callable[[], Any], tmp_path: Path) -> None:
    session = Session(RunOptions(out=tmp_path / "run", steps=12))
    session.start()
    with pytest.raises(StopRun) as stop:
        loop()
    session.finish(stop.value)
    assert session.report is not None
    assert session.report.steps == 12
    with contextlib.closing(sqlite3.connect(tmp_path / "run" / "history.sqlite")) as history:
        losses = [loss for (loss,) in history.execute("SELECT loss FROM steps ORDER BY step")]
    assert len(losses) == 12
    assert all(isinstance(loss, float) and 1.0 < loss < 3.0 for loss in losses)
    assert len(set(losses)) > 8


@pytest.mark.parametrize("policy", ["skip", "heal", "stop"])
@pytest.mark.parametrize("loop", [whole_step, forward_and_backward, graphed_callables])
def test_policies_look_at_nothing_in_a_capture(
    loop: Callable[[], Any], policy: Literal["skip", "heal", "stop"], tmp_path: Path
) -> None:
    plain, losses, scale = loop()
    session = Session(RunOptions(out=tmp_path / "run", on_nonfinite=policy))
    session.start()
    try:
        model, guarded_losses, guarded_scale = loop()
    finally:
        session.finish()
    assert (guarded_losses, guarded_scale) == (losses, scale)
    assert fingerprint(model) == fingerprint(plain)
    assert session.report is not None
    assert session.report.incidents == ()


def test_step_with_gradients_of_a_bad_replay_is_held_off(tmp_path: Path) -> None:
    def spoil(step: int, x: torch.Tensor) -> None:
        if step == 10:
            x[3] = 0.5

    session = Session(RunOptions(out=tmp_path / "run", on_nonfinite="skip"))
    session.start()
    try:
        model, losses, _ = by_hand(spoil=spoil)
    finally:
        session.finish()
    assert [step for step, loss in enumerate(losses) if loss != loss] == [10]
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert session.report is not None
    assert [incident.cause for incident in session.report.incidents] == ["division-by-zero"]
