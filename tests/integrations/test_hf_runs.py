"""The examples, and `ampguard run` over Trainer and Accelerate scripts."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from command_lines import ENVIRONMENT, EXAMPLES

from ampguard.report.store import read_report

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def ran(name: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    monkeypatch.setattr(sys, "argv", [name, *words.split()])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def accuracy(out: str) -> float:
    return float(out.split("accuracy ")[1].split("%")[0])


def test_two_optimizers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ours = ran("accelerate_digits.py", "--epochs 3", monkeypatch, capsys)
    in_float32 = ran("accelerate_digits.py", "--epochs 3 --plain", monkeypatch, capsys)
    theirs = ran("accelerate_digits.py", "--epochs 3 --scaler", monkeypatch, capsys)
    assert "loss scale 65536" in ours
    assert accuracy(ours) == pytest.approx(accuracy(in_float32), abs=2.0)
    assert accuracy(theirs) < accuracy(ours) - 10  # the second optimizer's gradients are divided twice


def test_the_trainer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = ran("hf_trainer_digits.py", "--epochs 1", monkeypatch, capsys)
    assert out.endswith("loss scale 65536\n")
    assert "'loss_scale'" in out


SCRIPT = """
from test_hf_trainer import rows, trainer_on
from ampguard.integrations.hf import prepare

trainer = trainer_on({folder!r}, bad=(4,), fp16=True)
prepare(trainer)
trainer.train()
print(rows(trainer)[-1].get("loss_scale"), rows(trainer)[-1]["skipped_steps"])
"""


@pytest.mark.slow
def test_in_bfloat16_from_the_command_line_there_is_no_scale(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(folder=str(tmp_path / "out")))
    command = [
        sys.executable,
        "-m",
        "ampguard",
        "run",
        "--precision",
        "bf16",
        "--out",
        str(tmp_path / "run"),
        str(script),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "None 0"
    assert [i.cause for i in read_report(tmp_path / "run").incidents if i.severity != "info"] == []
