"""What ends an iteration: unscale + clip + step + update, PyTorch's sequence against ours.

Both run in one process, in neighbouring pairs of blocks in alternating order, each on its own copy of the same
parameters and gradients; the figure is the median over the pairs of PyTorch's time divided by ours. Gradients are
written anew before each iteration, which is not timed. Our optimizer is built with no word about its implementation.
The last table is of whole training steps with `ampguard.Amp`, on the optimizer that PyTorch's loop has, too.
Prints the tables and writes results.md beside this file; of a CUDA device cuda.md, where each iteration is timed twice:
as a script sees it that waits for the device in every step, and with the device still at work on something else, so that
only its own time counts.

Run `python bench/step/run.py`, or with `--quick` for a rough look.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from cases import COMPARISONS, MAX_NORM, MODELS, SCALE, Comparison, Iteration
from torch import Tensor
from whole import loop

HERE = Path(__file__).parent
STEPS_PER_BLOCK = {"tiny": 20, "14M": 2, "100M": 1}
WHOLE_STEPS_PER_BLOCK = {"tiny": 20, "vit": 1}
BUSY = 20_000_000
"""Cycles of the device, some 10 ms: longer than the host takes to launch an iteration."""
PAIRS = {"tiny": 2.0, "14M": 1.0, "100M": 0.4}
"""Pairs of a model, as a part of `--pairs`: a large one takes longer, and is steadier."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the end of a training iteration.")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--whole", default="tiny,vit", help="workloads of bench/overhead for whole steps; may be empty")
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--only", default="", help="part of an optimizer's name")
    parser.add_argument("--device", default="cpu", help="cpu (CPU time) or cuda (CUDA events)")
    parser.add_argument("--quick", action="store_true", help="5 pairs, results.md left alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    if args.quick:
        args.pairs = 5
    text = ""
    for line in lines(args):
        print(line, flush=True)
        text += line + "\n"
    if not args.quick:
        (HERE / ("cuda.md" if args.device == "cuda" else "results.md")).write_text(text)


def lines(args: argparse.Namespace) -> Iterator[str]:
    device = torch.cuda.get_device_name() if args.device == "cuda" else cpu_name()
    clock = "CUDA events" if args.device == "cuda" else "process CPU time"
    yield "# The end of an iteration: unscale, clip, step, update\n"
    yield (
        f"torch {torch.__version__}, Python {platform.python_version()}, {device}, one thread. {clock}, medians of "
        f"{args.pairs} interleaved pairs (tiny: {count('tiny', args)}, 100M: {count('100M', args)}); beside them the "
        f"quartiles of the pairs. Loss scale {SCALE:g}, max_norm {MAX_NORM:g}, float32. In the first tables ours is "
        "always on the optimizer as it comes: `AdamW(parameters)`, not asked to be fused. Where PyTorch has no fused "
        "kernel and nothing is clipped, both do the same work on a large model. Written by `bench/step/run.py`."
    )
    for name in filter(None, args.models.split(",")):
        for is_queued in (False, True) if args.device == "cuda" else (False,):
            yield from table(name, is_queued, args)
    if args.whole:
        yield "\n## Whole training steps of bench/overhead: torch.amp, and `ampguard.Amp` with the same optimizer\n"
        yield "| workload | optimizer | torch.amp ms | Amp ms | times faster | quartiles | goal |"
        yield "|---|---|---|---|---|---|---|"
        for name in args.whole.split(","):
            for fused in (None, True):
                for max_norm in (None, MAX_NORM):
                    yield whole_row(name, fused, max_norm, args)


def table(name: str, is_queued: bool, args: argparse.Namespace) -> Iterator[str]:
    shapes = MODELS[name]
    title = f"{name}: {len(shapes)} tensors, {sum(torch.Size(s).numel() for s in shapes) / 1e6:.2f} M parameters"
    if args.device == "cuda":
        title += ", the device's own time" if is_queued else ", waited for"
    yield f"\n## {title}\n"
    yield "| PyTorch's optimizer | PyTorch's ms | ours ms | times faster | quartiles | goal |"
    yield "|---|---|---|---|---|---|"
    for comparison in COMPARISONS:
        has_kernel = args.device == "cpu" or not (comparison.optimizer is torch.optim.Adagrad and comparison.theirs)
        if args.only in str(comparison) and has_kernel:  # (PyTorch's fused Adagrad is for the CPU)
            yield row(name, comparison, is_queued, args)


def row(name: str, comparison: Comparison, is_queued: bool, args: argparse.Namespace) -> str:
    theirs, ours = (Iteration(MODELS[name], comparison, is_ours, args.device) for is_ours in (False, True))
    gradients = [torch.randn_like(p) for p in theirs.parameters]
    steps = STEPS_PER_BLOCK[name]
    pairs = paired(
        lambda: block(theirs, gradients, steps, args.device, is_queued),
        lambda: block(ours, gradients, steps, args.device, is_queued),
        count(name, args),
    )
    goal = comparison.goal if name != "tiny" else 1.0
    return f"| {comparison} | {figures(pairs, steps)} | {goal:.1f}x |"


def whole_row(name: str, fused: bool | None, max_norm: float | None, args: argparse.Namespace) -> str:
    steps, pairs = WHOLE_STEPS_PER_BLOCK[name], count(name, args)
    theirs, ours = (loop(name, is_ours, args.device, fused, max_norm) for is_ours in (False, True))
    times = paired(lambda: timed(theirs, steps, args.device), lambda: timed(ours, steps, args.device), pairs)
    optimizer = f"AdamW({'fused=True' if fused else ''})" + ("" if max_norm else ", no clipping")
    return f"| {name} | {optimizer} | {figures(times, steps)} | 1.0x |"


def count(name: str, args: argparse.Namespace) -> int:
    """Pairs for a model or workload."""
    return max(3, round(args.pairs * PAIRS.get(name, 1.0)))


def paired(theirs: Callable[[], float], ours: Callable[[], float], count: int) -> list[tuple[float, float]]:
    """Seconds of neighbouring blocks, after two of each that are not counted."""
    for _ in range(2):
        theirs(), ours()
    pairs = []
    for number in range(count):
        if number % 2:
            mine = ours()
            pairs.append((theirs(), mine))
        else:
            other = theirs()
            pairs.append((other, ours()))
    return pairs


def block(iteration: Iteration, gradients: list[Tensor], steps: int, device: str, is_queued: bool) -> float:
    """Seconds of some iterations, without the writing of their gradients."""
    seconds = 0.0
    for _ in range(steps):
        iteration.backward(gradients)
        seconds += timed(iteration.run, 1, device, is_queued)
    return seconds


def timed(step: Callable[[], object], steps: int, device: str, is_queued: bool = False) -> float:
    """CPU time of the process, or CUDA events around the steps: behind other work if they are to be queued."""
    if device == "cuda":
        torch.cuda.synchronize()
        if is_queued:
            torch.cuda._sleep(BUSY)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
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


def figures(pairs: list[tuple[float, float]], steps: int) -> str:
    gc.collect()
    ratios = [theirs / ours for theirs, ours in pairs]
    low, _, high = statistics.quantiles(ratios, n=4)
    theirs, ours = (statistics.median(side) / steps * 1e3 for side in zip(*pairs, strict=True))
    return f"{theirs:.2f} | {ours:.2f} | {statistics.median(ratios):.2f}x | {low:.2f} to {high:.2f}"


def cpu_name() -> str:
    try:
        names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
