"""The causes that take many steps: each broken script is diagnosed, its repaired twin is clean, both are what they claim."""

from __future__ import annotations

import math
import runpy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import ampguard
from ampguard.diagnose import dynamics
from ampguard.diagnose.dynamics.finding import RULES
from ampguard.incident import ACTIONS, Incident, Report
from ampguard.report.explain import explain

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Truth:
    """What is known of a broken script because it was broken on purpose."""

    steps: range
    phase: str
    severity: str
    module: str | None
    dtype: str
    evidence: str
    verified: frozenset[str] = frozenset()


TRUTHS = {
    "divergence": Truth(
        range(15, 20), "loss", "error", None, "float32", "began_at_step", frozenset({"lower-learning-rate"})
    ),
    "scale-collapse": Truth(range(8, 15), "backward", "error", "2", "float16", "since_step"),
    "lost-update": Truth(
        range(1), "optimizer", "warning", "0", "bfloat16", "stuck_share", frozenset({"fp32-parameters"})
    ),
    "optimizer-underflow": Truth(
        range(1), "optimizer", "error", "0", "float16", "eps", frozenset({"fp32-parameters", "add-epsilon"})
    ),
}


def run(script: Path, out: Path) -> Report:
    with ampguard.watch(out=out) as session:
        runpy.run_path(str(script))
    assert session.report is not None
    return session.report


def diagnosed(code: str, out: Path) -> Incident:
    report = run(HERE / code / "broken.py", out)
    assert [incident.cause for incident in report.incidents] == [code], "one story, one incident"
    return report.incidents[0]


@pytest.mark.parametrize("code", TRUTHS)
def test_broken_script_is_diagnosed(code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = TRUTHS[code]

    incident = diagnosed(code, tmp_path / "run")

    assert "fault of its own" not in capsys.readouterr().err
    assert incident.step in expected.steps
    assert (incident.phase, incident.severity) == (expected.phase, expected.severity)
    assert (incident.module, incident.dtype) == (expected.module, expected.dtype)
    assert expected.evidence in incident.evidence
    assert incident.location is not None
    assert incident.location.file == str(HERE / code / "broken.py")
    assert {fix.action for fix in incident.fixes} <= ACTIONS
    assert {fix.action for fix in incident.fixes if fix.verified} >= expected.verified


@pytest.mark.parametrize("code", TRUTHS)
def test_repaired_script_is_clean(code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(HERE / code / "fixed.py", tmp_path / "run")

    assert "fault of its own" not in capsys.readouterr().err
    assert report.incidents == ()
    assert report.steps >= 6


@pytest.mark.parametrize("code", ["lost-update", "optimizer-underflow"])
def test_line_is_that_of_the_optimizer(code: str, tmp_path: Path) -> None:
    incident = diagnosed(code, tmp_path / "run")

    assert incident.location is not None
    assert incident.location.code.endswith("# <- here")


def test_divergence_names_the_step_where_the_growth_began(tmp_path: Path) -> None:
    incident = diagnosed("divergence", tmp_path / "run")

    assert 12 <= incident.evidence["began_at_step"] <= 14, "the learning rate is raised after step 11"
    losses = incident.evidence["losses"]
    assert losses[-1][1] > 1e6 * losses[0][1]
    assert incident.evidence["weights_grew_by"] > 2


def test_collapse_names_the_step_since_when_and_nothing_else_is_told(tmp_path: Path) -> None:
    incident = diagnosed("scale-collapse", tmp_path / "run")

    assert 8 <= incident.evidence["since_step"] <= 14
    assert incident.op is not None
    assert incident.occurrences >= 20
    assert incident.evidence["scale"] < incident.evidence["scale_before"] / 500


# --- without the guard: truth from elsewhere -------------------------------------------------------------------------


def test_diverging_script_really_diverges() -> None:
    weights = runpy.run_path(str(HERE / "divergence" / "broken.py"))["model"][0].weight
    assert not weights.isfinite().all()
    weights = runpy.run_path(str(HERE / "divergence" / "fixed.py"))["model"][0].weight
    assert weights.isfinite().all()


def test_collapsing_scale_really_collapses() -> None:
    assert runpy.run_path(str(HERE / "scale-collapse" / "broken.py"))["scaler"].get_scale() < 1
    assert runpy.run_path(str(HERE / "scale-collapse" / "fixed.py"))["scaler"].get_scale() == 2.0**14


@pytest.mark.parametrize(("script", "moved"), [("broken.py", 0.1), ("fixed.py", 1.0)])
def test_updates_are_really_lost(script: str, moved: float) -> None:
    trained = runpy.run_path(str(HERE / "lost-update" / script))["model"][0].weight
    torch.manual_seed(0)
    first = torch.nn.Linear(16, 64).weight.to(trained.dtype)
    share = float((trained != first).float().mean())
    assert share < moved if script == "broken.py" else math.isclose(share, moved, abs_tol=0.02)


def test_adam_really_poisons_half_weights() -> None:
    assert not runpy.run_path(str(HERE / "optimizer-underflow" / "broken.py"))["model"][0].weight.isfinite().any()


# --- the vocabulary -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", TRUTHS)
def test_every_code_has_a_rule_and_a_page(code: str) -> None:
    dynamics.load()
    assert code in RULES
    page = explain(code)
    assert page.startswith(f"{code}: ")
    for heading in ("What happens", "Why it hurts", "Instead", "Not this"):
        assert heading in page
