"""Training past DDP's wrapper is told with the call; what leaves the weights equal, or is said to be meant, is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import Ranks

from ampguard.report.store import read_report

SCRIPT = str(Path(__file__).parent / "wrapped_trainings.py")
FAULTY = {  # the step after which they differ, the module, the line
    "never_called": (0, "", "model.module(x).square().mean().backward()"),
    "made_before": (0, "", "model.module(x).square().mean().backward()"),
    "called_without_gradients": (0, "", "(model.module(x) - acted - 1).square().mean().backward()"),
    "called_before": (4, "", "(model if i < 4 else model.module)(x).square().mean().backward()"),
    "inside_another": (0, None, "loss(x).backward()"),
    "a_part": (0, "value", "model.module.value(x).square().mean().backward()"),
}
HEALTHY = ("accumulated", "evaluated", "frozen", "unused", "on_their_own", "averaged_by_hand", "two_players")


@pytest.mark.slow
def test_trainings_past_the_wrapper(two_ranks: Ranks, tmp_path: Path) -> None:
    ended = two_ranks(SCRIPT, *FAULTY, *HEALTHY)
    assert [one.status for one in ended] == [0, 0], ended[0].err + ended[1].err
    assert "a fault of its own" not in ended[0].err + ended[1].err
    for name, (step, module, code) in FAULTY.items():
        incident = read_report(tmp_path / name).incidents[0]
        assert (incident.cause, incident.step, incident.rank) == ("rank-divergence", step, 1), name
        assert (incident.module, incident.location and incident.location.code) == (module, code), name
        assert "past its DistributedDataParallel wrapper" in incident.explanation
        assert [fix.action for fix in incident.fixes] == ["call-order", "load-weights"]
    for name in HEALTHY:
        assert read_report(tmp_path / name).incidents == (), name


def test_trainings_of_what_lies_outside_of_the_wrapper(two_ranks: Ranks, tmp_path: Path) -> None:
    outside = {"head_outside": ("head", "self.body = D"), "criterion_outside": ("criterion", "model = D")}
    healthy = ("own_head_outside", "spread_head_outside", "head_averaged_by_hand")
    ended = two_ranks(SCRIPT, *outside, *healthy)
    assert [one.status for one in ended] == [0, 0], ended[0].err + ended[1].err
    assert "a fault of its own" not in ended[0].err + ended[1].err
    for name, (module, code) in outside.items():
        (incident,) = read_report(tmp_path / name).incidents
        assert (incident.cause, incident.severity, incident.step) == ("rank-divergence", "error", 0), name
        assert incident.module == module, name
        assert incident.location is not None
        assert incident.location.code.startswith(code), name
        assert [fix.action for fix in incident.fixes] == ["call-order", "load-weights"]
    for name in healthy:
        assert read_report(tmp_path / name).incidents == (), name
