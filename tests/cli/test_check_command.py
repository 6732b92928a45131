"""`ampguard check` as a shell sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import warm

SOURCES = Path(__file__).parents[2] / "src"


def ampguard(*words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ampguard", *words]
    return warm.run(command, env=env, timeout=120)


def test_text() -> None:
    done = ampguard("check", "--device", "cpu")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ampguard ")
    assert any(line.startswith("cpu: CPU (") for line in lines)
    rows = {line.split()[0]: line for line in lines if line.startswith(("  float", "  bfloat"))}
    assert set(rows) >= {"float32", "float16", "bfloat16"}
    assert rows["float32"].count("good") == 4
    assert lines[-1].startswith("checked in ")


def test_json() -> None:
    done = ampguard("check", "--device", "cpu", "--format", "json")
    check = json.loads(done.stdout)
    assert check["schema"] == "ampguard.check/1"
    assert check["versions"]["torch"]
    precisions = {p["dtype"]: p for p in check["devices"][0]["precisions"]}
    assert precisions["bfloat16"]["operations"][0]["op"] == "matmul"
    assert all({"level", "code", "what", "do"} == set(finding) for finding in check["findings"])


@pytest.mark.parametrize(
    ("words", "message"), [(("--device", "tpu"), "not on this machine"), (("--format", "xml"), "text")]
)
def test_wrong_words(words: tuple[str, ...], message: str) -> None:
    done = ampguard("check", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
