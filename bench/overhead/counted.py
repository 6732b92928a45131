"""A workload whose steps are counted by valgrind: its clock is the CPU time, slowed by the factor by which valgrind slows it.

Run `python counted.py WORKLOAD STEPS FACTOR [--watch]`, under `ampguard run` or not; see `instructions.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import time

import torch
from rows import ROWS

STEPS_BEFORE = 100
CLOCKS = ("perf_counter", "monotonic", "process_time", "thread_time")
"""All become the CPU time: what else the machine does is none of the guard's time."""

cpu_time = time.process_time


def slow_down(clock: str, factor: float) -> None:
    began, cpu_began = getattr(time, clock)(), cpu_time()
    setattr(time, clock, lambda: began + (cpu_time() - cpu_began) / factor)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload")
    parser.add_argument("steps", type=int)
    parser.add_argument("factor", type=float)
    parser.add_argument("--watch", action="store_true")
    args = parser.parse_args()
    for clock in CLOCKS:
        slow_down(clock, args.factor)
    torch.set_num_threads(1)
    model, step = importlib.import_module(args.workload).make()
    with ROWS["ampguard.watch"](model) if args.watch else contextlib.nullcontext():
        for _ in range(STEPS_BEFORE):
            step()
        gc.collect()
        gc.disable()  # when it comes is a matter of chance
        start = time.perf_counter()
        for _ in range(args.steps):
            step()
        print("seconds a step", (time.perf_counter() - start) / max(args.steps, 1))


if __name__ == "__main__":
    main()
