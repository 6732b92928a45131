"""Weights of models without a wrapper: judged where the gradients are the same on both ranks, and nowhere else."""

from __future__ import annotations

from pathlib import Path

from launching import Ranks

from ampguard.report.store import read_report

SCRIPT = str(Path(__file__).parent / "unwrapped_trainings.py")
FAULTY = {"own_beginnings": (0, "4 of 4 weights"), "written_to_by_one": (4, "1 of 4 weights")}
FORGOTTEN = {
    "head_forgotten": ("head", "`head.weight`, `head.bias`"),
    "body_forgotten_in_flat_gradients": ("body", "`body.weight`"),
}
HEALTHY = ("sent_at_first", "independent", "one_beginning_two_ways")
HEALTHY_IN_PART = ("own_heads", "spread_body", "one_gradient_by_chance")


def test_gradients_averaged_by_hand(two_ranks: Ranks, tmp_path: Path) -> None:
    ended = two_ranks(SCRIPT, *FAULTY, *HEALTHY)
    assert [one.status for one in ended] == [0, 0], ended[0].err + ended[1].err
    assert "a fault of its own" not in ended[0].err + ended[1].err
    for name, (step, words) in FAULTY.items():
        incident = read_report(tmp_path / name).incidents[0]
        assert (incident.cause, incident.step, incident.rank) == ("rank-divergence", step, 1), name
        assert words in incident.explanation, name
        assert "load-weights" in [fix.action for fix in incident.fixes], name
    for name in HEALTHY:
        assert read_report(tmp_path / name).incidents == (), name


def test_gradients_averaged_behind_unscale(two_ranks: Ranks, tmp_path: Path) -> None:
    """The weights of one rank are NaN since, and so is what it sends: nothing is the same bit for bit any more."""
    ended = two_ranks(SCRIPT, "averaged_behind_unscale")
    assert [one.status for one in ended] == [0, 0], ended[0].err + ended[1].err
    assert "a fault of its own" not in ended[0].err + ended[1].err
    first, *others = read_report(tmp_path / "averaged_behind_unscale").incidents
    assert (first.cause, first.step) == ("rank-divergence", 5)
    assert first.location is not None
    assert first.location.code == "dist.all_reduce(p.grad)"
    assert "Rank 0 skipped step 5, and rank 1 made it" in first.explanation
    assert first.fixes[0].how.startswith("average the gradients before scaler.unscale_(optimizer)")
    assert not any("gradients of that update were finite" in other.explanation for other in others)


def test_gradients_of_a_part_averaged_by_hand(two_ranks: Ranks, tmp_path: Path) -> None:
    ended = two_ranks(SCRIPT, *FORGOTTEN, *HEALTHY_IN_PART)
    assert [one.status for one in ended] == [0, 0], ended[0].err + ended[1].err
    assert "a fault of its own" not in ended[0].err + ended[1].err
    for name, (module, words) in FORGOTTEN.items():
        (incident,) = read_report(tmp_path / name).incidents
        assert (incident.cause, incident.step, incident.module) == ("rank-divergence", 0, module), name
        assert incident.location is not None
        assert incident.location.code.startswith("dist.all_reduce("), name
        assert words in incident.explanation, name
        assert [fix.action for fix in incident.fixes] == ["call-order", "load-weights"], name
    for name in HEALTHY_IN_PART:
        assert read_report(tmp_path / name).incidents == (), name
