"""Each cause of bad gradients has a small broken training script, which must be diagnosed, and its repaired twin."""

from __future__ import annotations

import importlib
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import ampguard
from ampguard.diagnose import causes
from ampguard.diagnose.finding import RULES
from ampguard.incident import ACTIONS, Report, from_json

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Truth:
    """What is known of a broken script because it was broken on purpose."""

    step: int
    severity: str
    module: str | None
    op: str
    dtype: str
    fixes: frozenset[str]
    nonfinite: frozenset[str]


def truth(step: int, severity: str, module: str | None, op: str, dtype: str, fixes: str, nonfinite: str) -> Truth:
    return Truth(step, severity, module, op, dtype, frozenset(fixes.split()), frozenset(nonfinite.split()))


NET = "0.weight 0.bias 2.weight 2.bias"
TRUTHS = {
    "loss-scale-overflow": truth(0, "info", None, "aten._to_copy.default", "float16", "lower-loss-scale", NET),
    "gradient-overflow": truth(
        2, "error", "image", "aten.div.Tensor", "float16", "force-fp32 use-bf16 disable-amp", "image.project.weight"
    ),
    "singular-gradient": truth(
        2, "error", "", "aten.div.Tensor", "float32", "add-epsilon",
        "net.0.weight net.0.bias net.2.weight net.2.bias",
    ),
}  # fmt: skip


def run(script: Path, out: Path) -> Report:
    with ampguard.watch(out=out) as session:
        runpy.run_path(str(script))
    assert session.report is not None
    return session.report


def marked_line(script: Path) -> int:
    (line,) = [n for n, text in enumerate(script.read_text().splitlines(), 1) if text.endswith("# <- here")]
    return line


@pytest.mark.parametrize("code", TRUTHS)
def test_broken_script_is_diagnosed(code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, expected = HERE / code / "broken.py", TRUTHS[code]

    report = run(script, tmp_path / "run")

    shown = capsys.readouterr().err
    assert "fault of its own" not in shown
    assert report.status == ("clean" if expected.severity == "info" else "incidents")
    (only,) = report.incidents
    assert (only.cause, only.step, only.mode, only.phase) == (code, expected.step, "train", "backward")
    assert (only.severity, only.module, only.op, only.dtype) == (
        expected.severity, expected.module, expected.op, expected.dtype,
    )  # fmt: skip
    assert only.location is not None
    assert (only.location.file, only.location.line) == (str(script), marked_line(script))
    assert {fix.action for fix in only.fixes if fix.verified} >= expected.fixes
    assert all(fix.action in ACTIONS and fix.how for fix in only.fixes)
    assert set(only.evidence["parameters"]["nonfinite"]) == expected.nonfinite
    assert only.evidence["rung"] == "replay"
    assert from_json((tmp_path / "run" / "report.json").read_bytes()) == report


@pytest.mark.parametrize("code", TRUTHS)
def test_repaired_script_is_clean(code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(HERE / code / "fixed.py", tmp_path / "run")

    assert "fault of its own" not in capsys.readouterr().err
    assert report.incidents == ()
    assert report.steps >= 3


@pytest.mark.parametrize("code", TRUTHS)
def test_script_really_breaks_and_the_fixed_one_does_not(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the guard: truth from elsewhere."""
    losses: list[bool] = []
    bad: list[set[str]] = []
    original = torch.Tensor.backward

    def backward(loss: torch.Tensor, *args: Any) -> None:
        script = sys._getframe(1).f_globals
        losses.append(bool(script["loss"].isfinite()))
        original(loss, *args)
        parameters = script["model"].named_parameters()
        bad.append({name for name, p in parameters if p.grad is not None and not p.grad.isfinite().all()})

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    runpy.run_path(str(HERE / code / "broken.py"))
    expected = TRUTHS[code]
    assert all(losses[: expected.step + 1]), "the loss of the bad step is finite"
    assert [bool(names) for names in bad[: expected.step + 1]] == [False] * expected.step + [True]
    assert bad[expected.step] == expected.nonfinite

    losses.clear()
    bad.clear()
    runpy.run_path(str(HERE / code / "fixed.py"))
    assert len(losses) >= 3
    assert all(losses)
    assert not any(bad)


@pytest.mark.parametrize("code", TRUTHS)
def test_cause_has_a_file_and_a_page(code: str) -> None:
    module = importlib.import_module(f"ampguard.diagnose.causes.{code.replace('-', '_')}")
    causes.load()
    assert RULES[code].__module__ == module.__name__
    page = module.__doc__ or ""
    assert page.startswith(f"{code}: ")
    assert all(heading in page for heading in ("What happens", "Why it hurts", "Instead", "Not this"))
