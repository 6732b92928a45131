"""Gradients on an accelerator without a scaler: on the CPU, whose tensors are taken for a device's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import ampguard
from ampguard.capture import flags, gradients, on_device, recorder
from ampguard.capture.flags import FiniteFlag
from ampguard.capture.root_calls import buffers

BAD = 7


class Events:
    """What a device answers: at once, or only when it is waited for."""

    is_ahead = False

    def record(self) -> None: ...

    def query(self) -> bool:
        return not self.is_ahead


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> type[Events]:
    class Here(Events):
        pass

    monkeypatch.setattr(gradients, "all_finite_on_cpu", lambda tensors: True)
    for module in (flags, on_device):
        monkeypatch.setattr(module, "is_immediate", lambda tensor: False)
    monkeypatch.setattr(gradients, "HAS_CUDA", True)
    for module in (recorder, on_device):
        monkeypatch.setattr(module, "is_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", Here)
    monkeypatch.setattr(on_device, "is_in_use", lambda: True)
    return Here


def train(steps: int = 12) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        a = torch.randn(5, 4)
        b = a.clone() if step == BAD else a + torch.randn(5, 4)
        optimizer.zero_grad()
        (model(a) - model(b)).pow(2).sum(1).sqrt().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def guarded(tmp_path: Path, **how: Any) -> ampguard.Report:
    with ampguard.watch(out=tmp_path / "run", **how) as session:
        after = train()
        assert not session._barrier.tripped
    if not how:
        assert all(map(torch.equal, *([t.nan_to_num(7.0) for t in ts] for ts in (after, train()))))
    return session.report


def test_they_are_looked_at_before_the_update_where_the_device_waits_for_the_script(
    device: type[Events], tmp_path: Path
) -> None:
    (incident,) = guarded(tmp_path).incidents
    assert (incident.cause, incident.step, incident.phase) == ("singular-gradient", BAD, "backward")
    assert incident.evidence["rung"] == "replay"
    assert any(fix.verified for fix in incident.fixes)


def test_a_script_that_runs_ahead_is_not_held_up(
    device: type[Events], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.is_ahead = True
    monkeypatch.setattr(on_device, "available_bytes", lambda like: 0)
    (incident,) = guarded(tmp_path).incidents
    assert (incident.cause, incident.step, incident.phase) == ("unexplained", BAD, "backward")
    assert "the script runs ahead of it" in incident.evidence["not_replayed_because"]


def test_a_run_that_is_to_stop_waits(device: type[Events], tmp_path: Path) -> None:
    device.is_ahead = True
    (incident,) = guarded(tmp_path, on_nonfinite="stop").incidents
    assert (incident.cause, incident.step) == ("singular-gradient", BAD)


VALUES = st.sampled_from([0.0, 1.0, -3.0, 60000.0, float("nan"), float("inf"), float("-inf")])
TYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64])
TENSORS = st.lists(st.tuples(TYPES, st.lists(VALUES, max_size=3)), min_size=1, max_size=9)


@example([(torch.float32, [])] * 5)
@given(TENSORS)
def test_a_flag_of_many_is_that_of_each(described: list[tuple[torch.dtype, list[float]]]) -> None:
    tensors = [torch.tensor(values, dtype=torch.float64).to(dtype) for dtype, values in described]
    expected = all(bool(torch.isfinite(t).all()) for t in tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flags, "is_immediate", lambda tensor: False)
        assert FiniteFlag(tensors).is_set() == expected


class Rows(nn.Module):
    """A running variance that training never reads: of one row it is NaN."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("var", torch.ones(size))
        self.register_buffer("seen", torch.full((size,), -torch.inf))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.var.lerp_(x.var(0), 0.1)
                self.seen.clamp_(max=0.0)
        return x / (self.var if not self.training else x.var(0, correction=0) + 1.0).sqrt()


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_buffer_on_a_device_is_told_in_the_step_that_poisons_it(
    device: type[Events], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_scaled: bool
) -> None:
    """Its loss is finite, and so are the gradients: the damage would show in evaluation only."""
    monkeypatch.setattr(buffers, "is_immediate", lambda tensor: False)
    monkeypatch.setattr(recorder, "HAS_CUDA", True)
    torch.manual_seed(0)
    with ampguard.watch(out=tmp_path / "run") as guard:
        model = nn.Sequential(nn.Linear(4, 8), Rows(8), nn.Linear(8, 2), Rows(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", enabled=is_scaled, init_scale=4.0)
        for step in range(10):
            optimizer.zero_grad()
            loss = model(torch.randn(1 if step == BAD else 5, 4)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        model.eval()
        with torch.no_grad():
            model(torch.randn(3, 4))
    first, *_ = (incident for incident in guard.report.incidents if incident.severity == "error")
    assert (first.cause, first.step, first.op, first.location.code) == (
        "empty-reduction", BAD, "aten.var.correction", "self.var.lerp_(x.var(0), 0.1)",
    )  # fmt: skip
    assert first.evidence["rung"] == "replay"
    assert any(fix.verified for fix in first.fixes)
