"""The command line as installed: version, help, `explain`; quick, and without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ampguard._version import __version__
from ampguard.incident import CAUSES

SOURCES = Path(__file__).parents[2] / "src"


def ampguard(*words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(SOURCES)}
    return subprocess.run([sys.executable, "-m", "ampguard", *words], env=env, capture_output=True, text=True)


def test_version() -> None:
    assert ampguard("--version").stdout == f"ampguard, version {__version__}\n"


def test_help_names_every_command_and_option() -> None:
    assert {"run", "explain"} <= set(ampguard("--help").stdout.split())
    text = ampguard("run", "--help").stdout
    for word in (
        "SCRIPT [ARGS]...",
        "-m MODULE",
        "--steps N",
        "--out DIR",
        "--max-incidents N",
        "[observe|stop|skip|heal]",
        "--precision",
        "--force-fp32",
    ):
        assert word in text


def test_explain() -> None:
    assert ampguard("explain", "fp16-overflow").stdout.startswith("fp16-overflow: ")
    assert ampguard("explain", "FP16_Overflow").stdout.startswith("fp16-overflow: ")
    assert ampguard("explain").stdout.count("\n") == len(CAUSES)


@pytest.mark.parametrize("words", [["explain"], ["explain", "fp16-overflow"], ["run", "--help"], ["run", "nowhere.py"]])
def test_torch_is_not_waited_for(words: list[str]) -> None:
    script = f"""
import sys
from ampguard.cli import main
main({words!r})
assert "torch" not in sys.modules, "torch was imported"
"""
    env = {**os.environ, "PYTHONPATH": str(SOURCES)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
