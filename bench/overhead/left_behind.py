"""What stays when a guard has gone: the same training step before the first guard of a process, under it, and after it.

run.py pairs blocks of one process, and its plain blocks run behind guarded ones: what a guard leaves behind (memory that lies
otherwise, say) is in both. Each row is the median of several fresh processes; in each the least median step of some blocks.

Run `python bench/overhead/left_behind.py`; prints the table and writes left_behind.md beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import tiny
import torch

HERE = Path(__file__).parent
STEPS, LEFT_OUT = 250, 50
KINDS = {"nothing": "no guard (noise)", "import": "only imported", "guard": "ampguard.watch"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a guard leaves behind.")
    parser.add_argument("--processes", type=int, default=5, help="of each kind")
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.child is not None:
        print(json.dumps(measured(args.child)))
        return
    text = (
        "# What stays when a guard has gone\n\n"
        f"torch {torch.__version__}, Python {platform.python_version()}, one thread, the workload of `tiny`; CPU time, medians "
        f"of {args.processes} processes. Written by `bench/overhead/left_behind.py`.\n\n"
        "| row | before, ms a step | during / before | after / before |\n|---|---|---|---|\n"
    )
    found: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    for _ in range(args.processes):
        for kind in KINDS:
            found[kind].append(in_process(kind))
    for kind, times in found.items():
        before = statistics.median(b for b, _, _ in times)
        during = statistics.median(d / b for b, d, _ in times)
        after = statistics.median(a / b for b, _, a in times)
        text += f"| {KINDS[kind]} | {before * 1e3:.2f} | {during:.3f}x | {after:.3f}x |\n"
    print(text)
    (HERE / "left_behind.md").write_text(text)


def in_process(kind: str) -> list[float]:
    command = [sys.executable, __file__, "--child", kind]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    found: list[float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout)
    return found


def measured(kind: str) -> list[float]:
    """Seconds a step before, during and after."""
    _, step = tiny.make()
    block(step)
    before = min(block(step) for _ in range(2))
    with contextlib.redirect_stderr(io.StringIO()), tempfile.TemporaryDirectory() as folder:
        if kind == "guard":
            import ampguard

            with ampguard.watch(out=f"{folder}/run"):
                during = block(step)
        else:
            if kind == "import":
                import ampguard.run.watch
            during = block(step)
    return [before, during, min(block(step) for _ in range(3))]


def block(step: Callable[[], object]) -> float:
    """The median step."""
    times = []
    for _ in range(STEPS):
        began = time.process_time()
        step()
        times.append(time.process_time() - began)
    return statistics.median(times[LEFT_OUT:])


if __name__ == "__main__":
    main()
