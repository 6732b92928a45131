"""How a case is run: bare, under ampguard, and under each of the other tools."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import msgspec

from ampguard.incident import from_json

from .scoring import COLUMNS, Claim, Score, claim_of, score
from .truth import Case

ROOT = Path(__file__).resolve().parents[2]
BASELINES = {"detect-anomaly": "detect_anomaly", "hf-debug": "hf_debug", "msprobe": "msprobe"}
SPEAKS_OF = {
    "ampguard": COLUMNS,
    "detect-anomaly": ("found", "step", "mode", "op", "line"),
    "hf-debug": ("found", "step", "mode", "module"),
    "msprobe": ("found", "step", "mode", "module", "op", "line"),
}
"""The columns that a tool's output can fill. For ampguard all; no other tool names a cause or tries a fix."""

Status = int | Literal["timeout"]


class Run(msgspec.Struct, frozen=True):
    """How one process ended."""

    status: Status
    output: str
    seconds: float


def copy_case(case: Case, room: Path) -> Path:
    """A fresh copy of the case's folder, without the truth: a script must not be able to read it."""
    folder = room / "case"
    shutil.copytree(case.folder, folder, ignore=shutil.ignore_patterns("truth.json", "__pycache__"))
    return folder


def run_bare(case: Case, room: Path, timeout: float) -> Run:
    """The script as it is: what its exit status must stay."""
    return _run([sys.executable, *case.command], copy_case(case, room), timeout)


def run_tool(tool: str, case: Case, room: Path, timeout: float, bare: Status) -> Score:
    """One case under one tool, scored."""
    if tool == "ampguard":
        return _run_ampguard(case, room, timeout, bare)
    claim_file = room / "claim.json"
    module = f"bench.faults.baselines.{BASELINES[tool]}"
    run = _run([sys.executable, "-m", module, str(claim_file), *case.command], copy_case(case, room), timeout)
    (room / "output.txt").write_text(run.output, encoding="utf-8")
    if run.status == "timeout" or not claim_file.is_file():
        claim = Claim(found=False, note=f"no answer ({run.status}): {_last_line(run.output)}")
    else:
        claim = msgspec.json.decode(claim_file.read_bytes(), type=Claim)
    return score(case, claim, speaks_of=SPEAKS_OF[tool])


def _run_ampguard(case: Case, room: Path, timeout: float, bare: Status) -> Score:
    out = room / "run"
    command = [sys.executable, "-m", "ampguard", "run", "--out", str(out), *case.command]
    run = _run(command, copy_case(case, room), timeout)
    (room / "output.txt").write_text(run.output, encoding="utf-8")
    try:
        claim = claim_of(from_json((out / "report.json").read_bytes()))
    except (OSError, msgspec.DecodeError) as error:
        claim = Claim(found=False, note=f"no report ({run.status}): {error}: {_last_line(run.output)}")
    return score(case, claim, same_exit=run.status == bare)


def _run(command: list[str], folder: Path, timeout: float) -> Run:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "NO_COLOR": "1"}
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, timeout=timeout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
    except subprocess.TimeoutExpired as expired:
        return Run("timeout", (expired.stdout or b"").decode(errors="replace"), time.monotonic() - start)
    return Run(done.returncode, done.stdout.decode(errors="replace"), time.monotonic() - start)


def _last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1][:160] if lines else "no output"
