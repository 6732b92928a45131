"""Each protocol cause has a small broken training script, which must be diagnosed, and its repaired twin, which must be clean."""

from __future__ import annotations

import importlib
import runpy
from dataclasses import dataclass
from pathlib import Path

import pytest

import ampguard
from ampguard.diagnose import protocol
from ampguard.diagnose.protocol.telling import BREACH_RULES
from ampguard.incident import ACTIONS, CAUSES, Report
from ampguard.report.explain import explain

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Truth:
    """What is known of a broken script because it was broken on purpose."""

    step: int
    severity: str
    action: str
    names: tuple[str, ...]
    """What the card must call by the script's own name."""
    factor: float | None = None
    raises: str | None = None
    module: str | None = None


TRUTHS = {
    "no-gradients": Truth(
        0, "error", "call-order", ("optimizer", "body.weight"), raises="No inf checks", module="body"
    ),
    "stale-parameters": Truth(0, "error", "rebuild-optimizer", ("optimizer", "head.weight"), module="head"),
    "unscaled-backward": Truth(0, "error", "call-order", ("optimizer", "scaler"), 1 / 1024),
    "bypassed-scaler": Truth(0, "error", "call-order", ("opt_head",), 64.0),
    "clip-before-unscale": Truth(0, "error", "call-order", ("optimizer", "scaler.unscale_(optimizer)"), 1024.0),
    "double-unscale": Truth(0, "error", "call-order", ("optimizer",), raises="unscale_() has already"),
    "missing-update": Truth(3, "error", "call-order", ("scaler.update()",), raises="unscale_() has already"),
    "accumulation-broken": Truth(0, "error", "call-order", ("optimizer",), raises="unscale_() has already"),
    "fp16-parameters": Truth(
        0, "error", "fp32-parameters", ("body.weight", "body.bias"), raises="unscale FP16", module="body"
    ),
    "scheduler-on-skipped-step": Truth(0, "warning", "gate-scheduler", ("optimizer", "scaler.get_scale()")),
    "missing-zero-grad": Truth(1, "error", "call-order", ("optimizer.zero_grad()",)),
    "autocast-cache": Truth(1, "error", "call-order", ("body.weight", "head.weight")),
    "unused-parameters": Truth(0, "warning", "call-order", ("auxiliary.weight", "auxiliary.bias"), module="auxiliary"),
    "scaler-not-saved": Truth(0, "warning", "save-scaler-state", ("scaler.state_dict()", "last.pt")),
    "needless-scaler": Truth(0, "warning", "remove-scaler", ("scaler",)),
}
PROTOCOL_CAUSES = [code for code in list(CAUSES) if code in TRUTHS]


def run(script: Path, out: Path) -> tuple[Report, str]:
    raised = ""
    with ampguard.watch(out=out) as session:
        try:
            runpy.run_path(str(script))
        except (RuntimeError, AssertionError, ValueError) as error:
            raised = str(error)
    assert session.report is not None
    return session.report, raised


def marked_line(script: Path) -> int:
    (line,) = [n for n, text in enumerate(script.read_text().splitlines(), 1) if text.endswith("# <- here")]
    return line


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("code", TRUTHS)
def test_broken_script_is_diagnosed(code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, expected = HERE / code / "broken.py", TRUTHS[code]

    report, raised = run(script, tmp_path / "run")

    shown = capsys.readouterr().err
    assert "fault of its own" not in shown
    assert (expected.raises or "") in raised
    assert bool(expected.raises) == bool(raised)
    (incident,) = [i for i in report.incidents if i.severity != "info"]
    assert (incident.cause, incident.step, incident.severity) == (code, expected.step, expected.severity)
    assert (incident.mode, incident.phase, incident.module, incident.op) == ("train", "protocol", expected.module, None)
    assert incident.location is not None
    assert (incident.location.file, incident.location.line) == (str(script), marked_line(script))
    assert incident.fixes[0].action == expected.action in ACTIONS
    assert all(fix.verified is None for fix in incident.fixes)
    told = incident.explanation + " ".join(fix.how for fix in incident.fixes)
    for name in expected.names:
        assert name in told
    if expected.factor is not None:
        assert incident.evidence["factor"] == pytest.approx(expected.factor)


@pytest.mark.parametrize("code", TRUTHS)
def test_repaired_script_is_clean(code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, raised = run(HERE / code / "fixed.py", tmp_path / "run")

    assert "fault of its own" not in capsys.readouterr().err
    assert raised == ""
    assert report.status == "clean"
    assert [i.cause for i in report.incidents if i.phase == "protocol"] == []
    assert report.steps >= 3


@pytest.mark.parametrize("code", TRUTHS)
def test_cause_has_a_rule_and_a_page(code: str) -> None:
    module = importlib.import_module(f"ampguard.diagnose.protocol.{code.replace('-', '_')}")

    page = explain(code)
    assert page == module.__doc__.strip() if module.__doc__ else False
    assert page.startswith(f"{code}: ")
    for heading in ("What happens", "Why it hurts", "Instead"):
        assert heading in page
    protocol.load()
    assert BREACH_RULES[code].__module__ == module.__name__


def test_every_rule_answers_to_a_known_cause() -> None:
    protocol.load()
    of_numbers = {"nonfinite-parameter", "optimizer-underflow", "lost-update", "fp16-overflow", "overflow"}
    assert set(BREACH_RULES) == set(TRUTHS) | of_numbers
    assert set(BREACH_RULES) <= set(CAUSES)
