"""Bad numbers that the replay of a CUDA graph computes: its pass is run again without the graph, where one like it is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.usefixtures("device_graphs")

FIRST = 10


def lost_contact(step: int, x: Tensor) -> None:
    """From this step on one sample is constant: its standard deviation is 0."""
    if step >= FIRST:
        x[3] = 0.5


@pytest.mark.parametrize("warm_up_steps", [True, False])
def test_division_in_a_captured_pass(guard: Callable[..., Any], warm_up_steps: bool) -> None:
    from graph_loops import forward_and_backward

    run = guard(lambda: forward_and_backward(warm_up_steps=warm_up_steps, spoil=lost_contact))
    incident = run.first
    assert run.causes == ["division-by-zero"]
    assert (incident.module, incident.op) == ("standardize", "aten.div.Tensor")
    assert incident.location.code == "return centred / x.std(dim=1, keepdim=True)"
    assert (incident.step, incident.occurrences) == (FIRST + 3 * warm_up_steps, 14)
    assert incident.evidence["in_cuda_graph"].startswith("graph_loops.py:")
    assert incident.evidence["rung"] == "replay-inexact"
    assert "CUDA graph" in incident.explanation
    assert [fix.action for fix in incident.fixes if fix.verified] == ["add-epsilon", "clamp"]
    assert run.faults == 0


def test_answer_that_comes_when_the_scaler_has_waited(
    guard: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device it is not there yet when the replay has been queued."""
    from graph_loops import forward_and_backward

    from ampguard.capture.flags import FiniteFlag
    from ampguard.capture.judging import judge

    class Later(FiniteFlag):
        asked = 0

        @property
        def is_known(self) -> bool:
            self.asked += 1
            return self.asked > 1

    monkeypatch.setattr(judge.Judge, "is_healthy", lambda self, losses: False)
    monkeypatch.setattr(judge, "FiniteFlag", Later)
    run = guard(lambda: forward_and_backward(spoil=lost_contact))
    assert run.causes == ["division-by-zero"]
    assert (run.first.step, run.first.occurrences, run.first.module) == (3 + FIRST, 14, "standardize")


def test_answer_that_comes_after_the_update_blames_nothing(
    guard: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are spoilt by then, and the next batch is there: run again, the pass would blame one of them."""
    from graph_loops import by_hand

    from ampguard.capture.flags import FiniteFlag
    from ampguard.capture.judging import judge

    class NextTime(FiniteFlag):
        latest: NextTime | None = None

        def __init__(self, tensors: Any) -> None:
            super().__init__(tensors)
            self.is_good = super().is_set()
            NextTime.latest = self

        @property
        def is_known(self) -> bool:
            return NextTime.latest is not self

        def is_set(self) -> bool:
            return self.is_good

    monkeypatch.setattr(judge.Judge, "is_healthy", lambda self, losses: False)
    monkeypatch.setattr(judge, "FiniteFlag", NextTime)
    monkeypatch.setattr("ampguard.capture.gradients.all_finite_on_cpu", lambda gradients: True)
    run = guard(lambda: by_hand(spoil=lost_contact))
    assert run.causes == ["unexplained"]
    assert run.first.step == 2 + FIRST
    assert "changed" in run.first.explanation


def test_division_without_a_scaler_ends_the_training(guard: Callable[..., Any]) -> None:
    from graph_loops import by_hand

    run = guard(lambda: by_hand(spoil=lost_contact))
    assert run.causes == ["division-by-zero"]
    assert (run.first.step, run.first.module) == (2 + FIRST, "standardize")


def test_derivative_in_a_captured_pass(guard: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import graph_loops

    class Normed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lower, self.upper = torch.nn.Linear(16, 8), torch.nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.lower(x)
            length = (x.sum(1, keepdim=True) * h.sum(1, keepdim=True)).pow(2).sqrt()
            return self.upper(h) + length

    def spoil(step: int, x: Tensor) -> None:
        if step >= FIRST:
            x[3] = 0.0

    monkeypatch.setattr(graph_loops, "Sensors", Normed)
    run = guard(lambda: graph_loops.forward_and_backward(spoil=spoil))
    assert run.causes == ["singular-gradient"]
    assert run.first.location.code == "length = (x.sum(1, keepdim=True) * h.sum(1, keepdim=True)).pow(2).sqrt()"
    assert (run.first.step, run.first.occurrences) == (3 + FIRST, 14)
    assert run.first.evidence["in_cuda_graph"].startswith("graph_loops.py:")


def test_batch_that_holds_nan(guard: Callable[..., Any]) -> None:
    from graph_loops import forward_and_backward

    def spoil(step: int, x: Tensor) -> None:
        if step == FIRST:
            x[2, 5] = torch.nan

    run = guard(lambda: forward_and_backward(spoil=spoil))
    assert run.causes == ["nonfinite-input"]
    assert (run.first.step, run.first.evidence["samples"]) == (3 + FIRST, [2])


def test_scale_settles_in_replays(guard: Callable[..., Any]) -> None:
    from graph_loops import forward_and_backward

    run = guard(lambda: forward_and_backward(init_scale=2.0**22, warm_up_steps=False))
    assert run.causes == ["loss-scale-overflow"]
    assert (run.first.severity, run.first.step, run.first.occurrences) == ("info", 0, 8)


def test_step_within_the_graph_is_told_and_nothing_is_made_up(guard: Callable[..., Any]) -> None:
    """The weights are spoilt by the same replay: run again, the pass would blame them."""
    from graph_loops import whole_step

    run = guard(lambda: whole_step(spoil=lost_contact))
    assert run.causes == ["unexplained"]
    assert run.first.step == 4 + FIRST
    assert run.first.evidence["inputs_are_finite"] is True
    assert "an optimizer steps in the graph" in run.first.explanation
    assert "CUDA graph" in run.first.explanation


def test_no_pass_before_the_capture(guard: Callable[..., Any]) -> None:
    from graph_loops import forward_and_backward

    run = guard(lambda: forward_and_backward(warm_up=0, spoil=lost_contact))
    assert run.causes == ["unexplained"]
    assert run.first.step == FIRST
    assert run.first.location.code == "with torch.cuda.graph(graph):"
    assert "inputs_are_finite" not in run.first.evidence
    assert "no pass like that of the graph was recorded" in run.first.explanation


def test_another_pass_before_the_capture_is_not_taken_for_it(guard: Callable[..., Any]) -> None:
    """The warm-up ran on other inputs than the graph's static ones: they are finite, and so is that pass."""
    import torch.nn.functional as F  # noqa: N812
    from graph_loops import Sensors, batch

    def loop() -> None:
        torch.manual_seed(3)
        model = Sensors()
        opt = torch.optim.SGD(model.parameters(), lr=0.0)
        static_x, static_y = batch(0)
        for step in range(2):
            x, y = batch(step)
            opt.zero_grad(set_to_none=True)
            F.cross_entropy(model(x), y).backward()
            opt.step()
        graph = torch.cuda.CUDAGraph()
        opt.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            loss = F.cross_entropy(model(static_x), static_y)
            loss.backward()
        for step in range(4):
            x, y = batch(step)
            if step == 2:
                x[3] = 0.5
            static_x.copy_(x)
            static_y.copy_(y)
            graph.replay()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    run = guard(loop)
    assert run.causes == ["unexplained"]
    assert "the replayed step is finite" in run.first.explanation
