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
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
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
    """The script as it is: what its exit status must stay. Of several ranks one may be aborted by gloo as it ends, at times:
    what fails is run once more."""
    command, folder = [*launcher(case), *case.command], copy_case(case, room)
    run = run_command(command, folder, timeout)
    if case.ranks > 1 and run.status != 0:
        run = run_command(command, folder, timeout)
    (room / "output.txt").write_text(run.output, encoding="utf-8")
    return run


def launcher(case: Case) -> list[str]:
    """What starts a script or a `-m` module: Python, or torchrun with as many ranks as the case wants."""
    if case.ranks == 1:
        return [sys.executable]
    return [*TORCHRUN, "--nproc-per-node", str(case.ranks)]


def run_tool(tool: str, case: Case, room: Path, timeout: float, bare: Status) -> Score:
    """One case under one tool, scored."""
    if tool == "ampguard":
        return _run_ampguard(case, room, timeout, bare)
    module = f"bench.faults.baselines.{BASELINES[tool]}"
    command = [*launcher(case), "-m", module, str(room / "claim.json"), *case.command]
    run = run_command(command, copy_case(case, room), timeout)
    (room / "output.txt").write_text(run.output, encoding="utf-8")
    claims = [msgspec.json.decode(path.read_bytes(), type=Claim) for path in sorted(room.glob("claim*.json"))]
    if run.status == "timeout" or not claims:
        claim = Claim(found=False, note=f"no answer ({run.status}): {_last_line(run.output)}")
    else:
        claim = next((one for one in claims if one.found), claims[0])
    return score(case, claim, speaks_of=SPEAKS_OF[tool])


def _run_ampguard(case: Case, room: Path, timeout: float, bare: Status) -> Score:
    out = room / "run"
    command = [*launcher(case), "-m", "ampguard", "run", "--out", str(out), *case.command]
    run = run_command(command, copy_case(case, room), timeout)
    (room / "output.txt").write_text(run.output, encoding="utf-8")
    try:
        claim = claim_of(from_json((out / "report.json").read_bytes()))
    except (OSError, msgspec.DecodeError) as error:
        claim = Claim(found=False, note=f"no report ({run.status}): {error}: {_last_line(run.output)}")
    return score(case, claim, same_exit=run.status == bare)


def run_command(command: list[str], folder: Path, timeout: float) -> Run:
    """A process in `folder` that finds ampguard and the benchmarks; its two outputs as one text."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "NO_COLOR": "1"}
    start = time.monotonic()
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    status: Status
    try:
        output, _ = process.communicate(timeout=timeout)
        status = process.returncode
    except subprocess.TimeoutExpired:
        output, status = _stopped(process), "timeout"
    return Run(status, output.decode(errors="replace"), time.monotonic() - start)


def _stopped(process: subprocess.Popen[bytes], grace_s: float = 15.0) -> bytes:
    """Asked to end, then killed: torchrun passes the first on to its ranks, which the second would leave behind."""
    process.terminate()
    try:
        return process.communicate(timeout=grace_s)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


def _last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1][:160] if lines else "no output"
