"""What watching costs: CPU time and peak memory of a training step, guarded against plain.

Each row is measured inside one process by pairs of neighbouring blocks of steps, one plain and one with the row's tool,
in alternating order; the figure is the median of the pairs' ratios. `ampguard run` starts its own process, so its
row pairs whole processes. Prints the tables and writes results.md beside this file.

Run `python bench/overhead/run.py`, or with `--quick` for a rough look.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import torch
from rows import ROWS, Row
from torch import nn

HERE = Path(__file__).parent
STEPS_PER_BLOCK = {"tiny": 160, "loop": 160, "vit": 8}
WARM_UP_STEPS = {"tiny": 72, "loop": 72, "vit": 18}  # until what is learnt of a loop has been learnt
RUN_ROW = "ampguard run"
KEEPING = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
"""Has glibc's allocator keep the memory that it has. Else it gives tens of MiB back to the system and asks for them again in
each step, in one process more often than in another: 2,000 to 12,000 page faults a plain step of `vit`, up to 15 ms of 70."""
GOALS = {"tiny": 1.03, "loop": 1.03, "vit": 1.01}
MEMORY_GOAL = 1.02


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what watching a training costs.")
    parser.add_argument("--workloads", default="tiny,loop,vit")
    parser.add_argument("--rows", default=",".join([*ROWS, RUN_ROW]), help="comma-separated; see rows.py")
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--run-pairs", type=int, default=7, help="pairs of processes for `ampguard run`")
    parser.add_argument("--device", default="cpu", help="cpu (CPU time) or cuda (CUDA events)")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--quick", action="store_true", help="5 pairs, 2 pairs of processes, results.md left alone")
    parser.add_argument("--memory-child", nargs=2, metavar=("WORKLOAD", "ROW"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    if args.memory_child:
        train_for_memory(*args.memory_child, args.device)
        return
    if not os.environ.keys() >= KEEPING.keys():  # it is read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEPING})
    if args.quick:
        args.pairs, args.run_pairs = 5, 2

    text = header(args)
    print(text)
    for name in args.workloads.split(","):
        for line in tables(name, args):
            print(line, flush=True)
            text += line + "\n"
    if not args.quick:
        (HERE / "results.md").write_text(text)


def header(args: argparse.Namespace) -> str:
    device = torch.cuda.get_device_name() if args.device == "cuda" else cpu_name()
    clock = "CUDA events" if args.device == "cuda" else "process CPU time"
    return (
        "# What watching costs\n\n"
        f"torch {torch.__version__}, Python {platform.python_version()}, {device}, one thread. {clock}, "
        f"median of {args.pairs} interleaved pairs (of {args.run_pairs} pairs of processes for `{RUN_ROW}`), with an allocator "
        "that keeps its memory; "
        "in brackets the quartiles of the pairs. Written by `bench/overhead/run.py`.\n"
    )


def tables(name: str, args: argparse.Namespace) -> Iterator[str]:
    workload = importlib.import_module(name)
    model, step = workload.make(args.device)
    for _ in range(WARM_UP_STEPS[name] * 2):
        step()
    block_ms = timed_block(step, STEPS_PER_BLOCK[name], args.device) / STEPS_PER_BLOCK[name] * 1e3
    goal = f"; goal for ampguard: {GOALS[name]:.2f}x" if args.device == "cpu" else ""
    yield f"\n## {name}: {summary(workload)}\n\nA plain step takes {block_ms:.1f} ms{goal}.\n"
    yield "| row | time against plain | quartiles | ms a step |"
    yield "|---|---|---|---|"
    for row in args.rows.split(","):
        ratios = process_ratios(name, args) if row == RUN_ROW else block_ratios(ROWS[row], name, model, step, args)
        label = "plain (noise)" if row == "plain" else row
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        middle = statistics.median(ratios)
        yield f"| {label} | {middle:.3f}x | {low:.3f} to {high:.3f} | {block_ms * middle:.2f} |"
    if not args.no_memory and args.device == "cpu":
        yield from memory_table(name, args)


def block_ratios(
    row: Row, name: str, model: nn.Module, step: Callable[[], object], args: argparse.Namespace
) -> list[float]:
    """Guarded over plain, for each pair of neighbouring blocks."""

    def block(of: Row) -> float:
        with of(model):
            for _ in range(WARM_UP_STEPS[name]):
                step()
            return timed_block(step, STEPS_PER_BLOCK[name], args.device)

    ratios = []
    for pair in range(args.pairs):
        if pair % 2:
            guarded, bare = block(row), block(ROWS["plain"])
        else:
            bare, guarded = block(ROWS["plain"]), block(row)
        ratios.append(guarded / bare)
    return ratios


def timed_block(step: Callable[[], object], steps: int, device: str) -> float:
    """Seconds for `steps` steps: CPU time of the process, or CUDA events around them."""
    gc.collect()
    if device == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(steps):
            step()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3
    begin = time.process_time()
    for _ in range(steps):
        step()
    return time.process_time() - begin


def process_ratios(name: str, args: argparse.Namespace) -> list[float]:
    """`ampguard run` over `python`, each pair two fresh processes that time their own blocks, start-up left out."""
    steps = STEPS_PER_BLOCK[name] * 4
    script = [str(HERE / f"{name}.py"), str(steps), "--block", str(STEPS_PER_BLOCK[name]), "--device", args.device]

    def median_block(guarded: bool) -> float:
        with tempfile.TemporaryDirectory() as folder:
            out = subprocess.run(command(script, guarded, folder), check=True, capture_output=True, text=True).stdout
        blocks = [float(seconds) for seconds in re.findall(r"cpu ([0-9.]+) s", out)]
        return statistics.median(blocks[1:])  # the first holds one-time costs

    ratios = []
    for pair in range(args.run_pairs):
        first = bool(pair % 2)
        by_guard = {first: median_block(first), (not first): median_block(not first)}
        ratios.append(by_guard[True] / by_guard[False])
    return ratios


def command(script: list[str], guarded: bool, folder: str) -> list[str]:
    guard = ["-m", "ampguard", "run", "--out", f"{folder}/run"] if guarded else []
    return [sys.executable, *guard, *script]


def memory_table(name: str, args: argparse.Namespace) -> Iterator[str]:
    steps = str(STEPS_PER_BLOCK[name] * 3)
    script = [str(HERE / f"{name}.py"), steps]
    yield f"\nPeak memory of a process of {steps} steps (goal for ampguard: {MEMORY_GOAL:.2f}x).\n"
    yield "| row | peak MiB | against plain |"
    yield "|---|---|---|"
    bare = None
    for row in args.rows.split(","):
        with tempfile.TemporaryDirectory() as folder:
            if row == RUN_ROW:
                peaks = [peak_mib(command(script, guarded=True, folder=f"{folder}/{i}")) for i in range(3)]
            else:
                child = [sys.executable, str(HERE / "run.py"), "--memory-child", name, row]
                peaks = [peak_mib(child) for _ in range(3)]
        peak = statistics.median(peaks)
        bare = bare or (peak if row == "plain" else None)
        yield f"| {row} | {peak:.1f} | {f'{peak / bare:.3f}x' if bare else '-'} |"


def train_for_memory(name: str, row: str, device: str) -> None:
    """The child process of one memory figure."""
    workload = importlib.import_module(name)
    model, step = workload.make(device)
    with ExitStack() as stack:
        stack.enter_context(ROWS[row](model))
        for _ in range(STEPS_PER_BLOCK[name] * 3):
            step()


def peak_mib(arguments: list[str]) -> float:
    """Largest resident set of a child process.

    Linux lets a child's ru_maxrss begin at its parent's, so a small process without torch stands in between.
    It counts in KiB, macOS in bytes. The allocator gives memory back here, as it does for everybody.
    """
    between = (
        "import resource, subprocess, sys\n"
        "status = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "print(status, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    measured = [sys.executable, "-c", between, *arguments]
    giving_back = {name: value for name, value in os.environ.items() if name not in KEEPING}
    out = subprocess.run(measured, env=giving_back, check=True, capture_output=True, text=True).stdout
    status, peak = map(int, out.split())
    if status:
        raise SystemExit(f"exit status {status}: {' '.join(arguments)}")
    return peak / (1024 if sys.platform != "darwin" else 1024**2)


def summary(module: ModuleType) -> str:
    return (module.__doc__ or "").splitlines()[0].rstrip(".")


def cpu_name() -> str:
    try:
        names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
