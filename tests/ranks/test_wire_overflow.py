"""Gradients that are finite on each rank and too large for the type in which DDP's hook sends them."""

from __future__ import annotations

from pathlib import Path

from launching import Ranks

from ampguard.report.store import read_report

SCRIPT = str(Path(__file__).parent / "compressed_trainings.py")
OVERFLOWS = {  # the ranks, the operator, whether it is in the sum
    "fp16": ([1], "aten._to_copy.default", False),
    "builtin": ([0], "aten._to_copy.default", False),
    "wrapped": ([1], "aten._to_copy.default", False),
    "own_hook": ([0, 1], "c10d.allreduce_.default", True),
}
SILENT = ("power_sgd", "none", "fits")


def test_overflows_on_the_wire(two_ranks: Ranks, tmp_path: Path) -> None:
    ended = two_ranks(SCRIPT, *OVERFLOWS, *SILENT, "nan")
    assert [one.status for one in ended] == [0, 0], ended[0].err + ended[1].err
    assert "a fault of its own" not in ended[0].err + ended[1].err
    for name, (ranks, op, in_sum) in OVERFLOWS.items():
        (incident,) = read_report(tmp_path / name).incidents
        assert (incident.cause, incident.step, incident.phase) == ("gradient-overflow", 4, "backward"), name
        assert (incident.evidence["ranks"], incident.op, incident.evidence["in_sum"]) == (ranks, op, in_sum), name
        assert (incident.dtype, incident.module) == ("float16", ""), name
        assert incident.location is not None
        assert incident.location.code.endswith(".backward()") == (name != "own_hook")
    for name in SILENT:
        assert read_report(tmp_path / name).incidents == (), name
    (poisoned,) = read_report(tmp_path / "nan").incidents
    assert poisoned.cause != "gradient-overflow"
