"""What watching costs, counted: the machine instructions of a training step, guarded against plain.

Instructions are no time, but a busy machine counts as many as a quiet one: the figures repeat within some 0.2 %. Each
row runs a workload twice under valgrind, for few steps and for many; the difference is what a step takes, without
start-up and end. The clock that the guard looks at goes slower by the factor by which valgrind slows the steps.
PyTorch's plain kernels are used (ATEN_CPU_CAPABILITY=default).

Needs valgrind. Takes some 35 minutes. Run `python bench/overhead/instructions.py`; writes instructions.md beside this file.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
FEW, MANY = 4, 68
ROWS = {"plain": [], "ampguard.watch": ["--watch"], "ampguard run": []}


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the instructions of a training step, guarded and plain.")
    parser.add_argument("--workloads", default="tiny,loop")
    parser.add_argument("--rows", default=",".join(ROWS))
    args = parser.parse_args()
    if shutil.which("valgrind") is None:
        raise SystemExit("valgrind is not installed: this benchmark counts instructions with it.")
    text = (
        "# What watching costs, in machine instructions\n\n"
        f"torch {torch.__version__}, Python {platform.python_version()}, one thread, valgrind's callgrind; "
        f"the mean of {MANY - FEW} steps. Written by `bench/overhead/instructions.py`.\n"
    )
    print(text)
    for workload in args.workloads.split(","):
        lines = [f"\n## {workload}\n", "| row | million instructions a step | against plain |", "|---|---|---|"]
        factor = seconds_a_step(workload, valgrind=True) / seconds_a_step(workload, valgrind=False)
        plain = None
        for row in args.rows.split(","):
            counted = (instructions(workload, row, MANY, factor) - instructions(workload, row, FEW, factor)) / (
                MANY - FEW
            )
            plain = plain or (counted if row == "plain" else None)
            lines.append(f"| {row} | {counted / 1e6:.2f} | {f'{counted / plain:.4f}x' if plain else '-'} |")
        print("\n".join(lines), flush=True)
        text += "\n".join(lines) + "\n"
        (HERE / "instructions.md").write_text(text)


def seconds_a_step(workload: str, valgrind: bool) -> float:
    return float(re.findall(r"seconds a step ([0-9.e-]+)", run(workload, "plain", 4, 1.0, valgrind))[0])


def instructions(workload: str, row: str, steps: int, factor: float) -> int:
    counted = re.findall(r"Collected : (\d+)", run(workload, row, steps, factor, valgrind=True))
    if not counted:
        raise SystemExit(f"valgrind counted nothing for {row} of {workload}.")
    return int(counted[0])


def run(workload: str, row: str, steps: int, factor: float, valgrind: bool) -> str:
    with tempfile.TemporaryDirectory() as folder:
        counter = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/counts"] if valgrind else []
        guard = ["-m", "ampguard", "run", "--out", f"{folder}/run"] if row == "ampguard run" else []
        script = [str(HERE / "counted.py"), workload, str(steps), str(factor), *ROWS[row]]
        done = subprocess.run(
            [*counter, sys.executable, *guard, *script],
            env={**os.environ, "OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default", "PYTHONHASHSEED": "0"},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise SystemExit(f"exit status {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout + done.stderr


if __name__ == "__main__":
    main()
