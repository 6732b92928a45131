"""Each cause has a small broken training script, which must be diagnosed, and its repaired twin, which must be clean."""

from __future__ import annotations

import importlib
import runpy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import ampguard
from ampguard.diagnose import causes
from ampguard.diagnose.finding import RULES
from ampguard.incident import ACTIONS, CAUSES, Report, from_json

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Truth:
    """What is known of a broken script because it was broken on purpose."""

    step: int
    phase: str
    module: str | None
    op: str
    dtype: str
    fixes: frozenset[str]


def truth(step: int, phase: str, module: str | None, op: str, dtype: str, fixes: str) -> Truth:
    return Truth(step, phase, module, op, dtype, frozenset(fixes.split()))


TRUTHS = {
    "nonfinite-input": truth(2, "data", "hidden", "aten.addmm.default", "float32", "filter-sample fix-data"),
    "nonfinite-parameter": truth(0, "parameters", "norm", "aten.mul.Tensor", "float32", "initialise-parameter"),
    "fp16-overflow": truth(2, "forward", "blocks.1", "aten.bmm.default", "float16", "force-fp32 use-bf16 disable-amp"),
    "fp16-underflow": truth(2, "forward", "unit", "aten.div.Tensor", "float16", "add-epsilon force-fp32 disable-amp"),
    "mask-overflow": truth(1, "forward", "pool", "aten.scalar_tensor.default", "float16", "mask-value"),
    "division-by-zero": truth(2, "loss", None, "aten.div.Tensor", "float32", "add-epsilon"),
    "domain-error": truth(2, "forward", "", "aten.log.default", "float32", "clamp"),
    "overflow": truth(1, "loss", None, "aten.exp.default", "float32", "clamp"),
    "empty-reduction": truth(2, "loss", None, "aten.mean.default", "float32", "guard-empty"),
    "masked-softmax": truth(1, "forward", "attention", "aten._softmax.default", "float32", "fix-mask"),
    "infeasible-target": truth(1, "loss", "", "aten._ctc_loss.Tensor", "float32", "filter-sample"),
    "quantizer-scale": truth(2, "forward", "0", "aten.reciprocal.default", "float32", "add-epsilon clamp"),
    "indeterminate": truth(1, "forward", "", "aten.sub.Tensor", "float32", "mask-value"),
}
"""The causes of forward and evaluation failures, and where each script has its own."""


def run(script: Path, out: Path) -> Report:
    with ampguard.watch(out=out) as session:
        runpy.run_path(str(script))
    assert session.report is not None
    return session.report


def marked_line(script: Path) -> int:
    lines = script.read_text().splitlines()
    (line,) = [number for number, text in enumerate(lines, 1) if text.endswith("# <- here")]
    return line


@pytest.mark.parametrize("code", TRUTHS)
def test_broken_script_is_diagnosed(code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = HERE / code / "broken.py"
    expected = TRUTHS[code]

    report = run(script, tmp_path / "run")

    shown = capsys.readouterr().err
    assert "fault of its own" not in shown
    assert code in shown
    assert report.status == "incidents"
    first = report.incidents[0]
    assert (first.cause, first.step, first.mode) == (code, expected.step, "train")
    assert (first.phase, first.module, first.op, first.dtype) == (
        expected.phase, expected.module, expected.op, expected.dtype,
    )  # fmt: skip
    assert first.location is not None
    assert (first.location.file, first.location.line) == (str(script), marked_line(script))
    assert first.location.code in script.read_text()
    verified = {fix.action for fix in first.fixes if fix.verified}
    assert verified >= expected.fixes
    assert all(fix.action in ACTIONS and fix.how for fix in first.fixes)
    assert len(report.incidents) == 1, "one failure, one incident"


@pytest.mark.parametrize("code", TRUTHS)
def test_repaired_script_is_clean(code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(HERE / code / "fixed.py", tmp_path / "run")

    assert "fault of its own" not in capsys.readouterr().err
    assert report.status == "clean"
    assert [incident for incident in report.incidents if incident.severity != "info"] == []
    assert report.steps >= 3


@pytest.mark.parametrize("code", TRUTHS)
def test_broken_script_really_breaks_and_the_fixed_one_does_not(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the guard: truth from elsewhere."""
    losses: list[bool] = []
    original = torch.Tensor.backward

    def backward(loss: torch.Tensor) -> None:
        losses.append(bool(loss.isfinite()))
        original(loss)

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    runpy.run_path(str(HERE / code / "broken.py"))
    assert losses.index(False) == TRUTHS[code].step
    losses.clear()
    runpy.run_path(str(HERE / code / "fixed.py"))
    assert len(losses) >= 3
    assert all(losses)


def test_incident_holds_numbers_that_json_can_hold(tmp_path: Path) -> None:
    report = run(HERE / "fp16-overflow" / "broken.py", tmp_path / "run")

    stored = from_json((tmp_path / "run" / "report.json").read_bytes())
    assert stored == report
    evidence = stored.incidents[0].evidence
    assert evidence["limit"] == 65504.0 < evidence["max_abs_fp32"]
    assert evidence["rung"] == "replay"
    assert f"{evidence['max_abs_fp32']:.0f}"[:6] in stored.incidents[0].explanation


# --- the vocabulary -------------------------------------------------------------------------------------------------


FORWARD_CAUSES = (*tuple(CAUSES)[:12], "quantizer-scale")
"""The contract lists most of them first."""


def test_scenarios_are_the_forward_causes() -> None:
    assert set(FORWARD_CAUSES) == set(TRUTHS)
    folders = {path.parent.name for path in HERE.glob("*/broken.py")}
    assert folders >= set(TRUTHS)


@pytest.mark.parametrize("code", FORWARD_CAUSES)
def test_cause_has_a_file_a_page_and_a_scenario(code: str) -> None:
    module = importlib.import_module(f"ampguard.diagnose.causes.{code.replace('-', '_')}")

    page = module.__doc__
    assert page is not None
    assert page.startswith(f"{code}: ")
    for heading in ("What happens", "Why it hurts", "Instead"):
        assert heading in page
    causes.load()
    assert RULES[code].__module__ == module.__name__
    for name in ("broken.py", "fixed.py"):
        assert (HERE / code / name).is_file()


def test_every_rule_answers_to_a_known_cause() -> None:
    causes.load()
    assert set(RULES) <= set(CAUSES)
    files = {path.stem for path in Path(causes.__file__).parent.glob("*.py")} - {"__init__"}
    assert files - {"gradient_underflow"} == {code.replace("-", "_") for code in RULES}  # it is proved by another way
