"""The example, `ampguard run` over a Lightning script, and what importing the drop-in imports."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from command_lines import ENVIRONMENT, EXAMPLES

from ampguard.report.store import read_report

pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(("words", "scale"), [("", "65536"), ("--burst 2", "32768"), ("--plugin lightning", "65536")])
def test_the_example(
    words: str, scale: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning_digits.py", "--epochs", "1", *words.split()])
    runpy.run_path(str(EXAMPLES / "lightning_digits.py"), run_name="__main__")
    assert capsys.readouterr().out.endswith(f"loss scale {scale}\n")


SCRIPT = """
from lightning_modules import classifier, fit
from ampguard.integrations.lightning import GuardCallback, GuardedPrecision

plugin = GuardedPrecision("16-mixed", "cpu", init_scale=2.0**14)
fit("lightning.pytorch", classifier("lightning.pytorch"), plugin, 6, (4,), callbacks=[GuardCallback()])
print(plugin.scaler.get_scale())
"""


@pytest.mark.slow
def test_the_command_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "ampguard", "run", "--out", str(tmp_path / "run"), str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT, cwd=tmp_path)
    assert ran.stdout.splitlines()[-1] == "8192.0"
    report = read_report(tmp_path / "run")
    assert [(i.cause, i.step) for i in report.incidents if i.severity != "info"] == [("fp16-overflow", 4)]


IMPORTS = """
import sys
import ampguard.integrations.lightning, ampguard.integrations.hf
frameworks = {"lightning", "pytorch_lightning", "lightning_fabric", "transformers", "accelerate", "ampguard.run.session"}
assert not frameworks & set(sys.modules), frameworks & set(sys.modules)
from ampguard.integrations.lightning import GuardedPrecision
GuardedPrecision("16-mixed", "cpu")
assert "lightning.pytorch" in sys.modules
"""


@pytest.mark.slow
def test_no_framework_is_imported_unasked() -> None:
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, env=ENVIRONMENT)
