"""Steps that rest on what other ranks sent are run again from that: nobody is waited for, and the replay is the step."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import Ranks

from ampguard.report.store import read_report

SCRIPT = Path(__file__).parent / "gathering_trainings.py"
HEALTHY = (
    "healthy_contrastive",
    "healthy_by_function",
    "healthy_centered",
    "healthy_balanced",
    "healthy_exchanged",
    "healthy_ring",
)
FAULTY = {
    "contrastive": ("fp16-overflow", "aten.mm.default", 0),
    "by_function": ("overflow", "aten.exp.default", 0),
    "centered": ("domain-error", "aten.log.default", 1),
    "balanced_codes": ("overflow", "aten.exp.default", 1),
    "exchanged": ("overflow", "aten.exp.default", 0),
    "ring": ("overflow", "aten.exp.default", 0),
    "ring_posted": ("overflow", "aten.exp.default", 0),
    "lengths": ("overflow", "aten.exp.default", 0),
    "pipeline": ("division-by-zero", "aten.div.Tensor", 0),
    "evaluated": ("division-by-zero", "aten.div.Tensor", 1),
}
"""Cause, operator, and the first rank that sees it. The fault of `contrastive` is in what all ranks compute alike."""


def line_of(mark: str) -> int:
    lines = SCRIPT.read_text().splitlines()
    return next(
        number
        for number, line in enumerate(lines, 1)
        if f"# BAD {mark.removesuffix('_codes').removesuffix('_posted')}" in line
    )


@pytest.mark.slow
def test_losses_over_all_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    ended = two_ranks(str(SCRIPT), *HEALTHY, *FAULTY)
    said = ended[0].err + ended[1].err
    assert [one.status for one in ended] == [0, 0], said
    assert "a fault of its own" not in said
    for name in HEALTHY:
        assert read_report(tmp_path / name).incidents == (), name
    for name, (cause, op, rank) in FAULTY.items():
        incident = read_report(tmp_path / name).incidents[0]
        step = 8 if name == "evaluated" else 5
        assert (incident.cause, incident.op, incident.step, incident.rank) == (cause, op, step, rank), name
        assert incident.location is not None
        assert incident.location.line == line_of(name), name
        assert any(fix.verified for fix in incident.fixes), (name, incident.fixes)
    assert "was not bit for bit" not in said
    for name in ("evaluated", "pipeline"):
        assert [i.cause for i in read_report(tmp_path / name).incidents] == ["division-by-zero"]
    assert read_report(tmp_path / "pipeline").incidents[0].evidence["reached_ranks"] == [1]


def test_a_settling_scale_is_a_note_where_gradients_are_exchanged(two_ranks: Ranks, tmp_path: Path) -> None:
    ended = two_ranks(str(SCRIPT), "settling")
    assert [one.status for one in ended] == [0, 0], ended[0].err + ended[1].err
    incidents = read_report(tmp_path / "settling").incidents
    assert {(i.cause, i.severity) for i in incidents} == {("loss-scale-overflow", "info")}
