"""Watching changes nothing: six kinds of loop, run plain and under `ampguard run`, leave the same state bit for bit.

Every loop has steps that fail, so incidents are diagnosed (replayed, several times over) on the way. Compared are
SHA-256 digests of losses, parameters, gradients, buffers, optimizer and scaler state and of three RNG streams.
Prints the table and writes results.md beside this file; exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
LOOPS = {
    "scaler": "GradScaler, float16",
    "no_scaler": "no scaler, float32",
    "bf16": "bfloat16, clipping",
    "accumulation": "accumulation, clipping, schedule",
    "gan": "two optimizers (GAN)",
    "batchnorm_workers": "BatchNorm, dropout, DataLoader workers",
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare guarded and plain trainings bit for bit.")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--loops", default=",".join(LOOPS))
    args = parser.parse_args()
    names = args.loops.split(",")

    text = (
        "# Watching changes nothing\n\n"
        f"torch {torch.__version__}, Python {platform.python_version()}; {args.steps} steps of each loop, plain and "
        "under `ampguard run`. Written by `bench/bitwise/run.py`.\n\n"
        "| loop | incidents diagnosed | compared | differs |\n|---|---|---|---|\n"
    )
    print(text, end="")
    worst = 0
    for name in names:
        line, failed = compare(name, args.steps)
        print(line, flush=True)
        text += line + "\n"
        worst |= failed
    if names == list(LOOPS):
        (HERE / "results.md").write_text(text)
    return worst


def compare(name: str, steps: int) -> tuple[str, bool]:
    """One line of the table, and whether anything went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        plain = train(name, steps, here / "plain.json")
        # Two plain runs that disagree would make the comparison below mean nothing.
        again = train(name, steps, here / "again.json")
        guarded = train(name, steps, here / "guarded.json", guard=["-m", "ampguard", "run", "--out", f"{here}/run"])
        report = read_json(here / "run" / "report.json")
    if plain != again:
        return f"| {LOOPS[name]} | - | - | the loop itself is not deterministic |", True
    differs = [part for part in plain if guarded.get(part) != plain[part]]
    causes = [f"{incident['cause']} (step {incident['step']})" for incident in report["incidents"]]
    line = f"| {LOOPS[name]} | {', '.join(causes) or 'none'} | {', '.join(plain)} | {', '.join(differs) or 'nothing'} |"
    return line, bool(differs) or not causes


def train(name: str, steps: int, digests: Path, guard: list[str] | None = None) -> dict[str, str]:
    script = [str(HERE / "loops" / f"{name}.py"), str(digests), "--steps", str(steps)]
    command = [sys.executable, *(guard or []), *script]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"exit status {done.returncode}: {' '.join(command)}\n{done.stderr}")
    return read_json(digests)


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


if __name__ == "__main__":
    sys.exit(main())
