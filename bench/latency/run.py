"""How soon the card appears after a failure, and what a script pays that goes on failing.

1. One step fails. From the moment its loss is known until the card is on stderr, for a small and a large step.
   Goal: at most 30 times the step, at least 3 s allowed.
2. Every step fails. CPU time of the steps after the investigations are used up, guarded against plain.
   Goal: at most 1.1x. `same` fails at one place (investigated once), `moving` at twelve.

Prints the tables and writes results.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
SIZES = {"small": ["--dim", "32"], "large": ["--dim", "256", "--depth", "6"]}
SETTLED = 100
"""Steps of the failing script that are left out: the investigations fall into them."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the time to a card, and the price of failing on and on.")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    text = (
        "# From a failure to its card\n\n"
        f"torch {torch.__version__}, Python {platform.python_version()}, one thread; medians of {args.repeats} runs. "
        "Written by `bench/latency/run.py`.\n\n"
        "| failing step | mean step, plain | failure to card | in steps | allowed |\n|---|---|---|---|---|\n"
    )
    for size in SIZES:
        step, card = card_times(size, args.repeats)
        text += f"| {size} | {step * 1e3:.1f} ms | {card:.2f} s | {card / step:.0f} | {max(3.0, 30 * step):.2f} s |\n"
    text += "\n| every step fails | plain | guarded, settled | ratio | allowed |\n|---|---|---|---|---|\n"
    for kind in ("same", "moving"):
        plain, guarded, ratio = settled_times(kind, args.repeats)
        text += f"| {kind} place | {plain * 1e3:.2f} ms a step | {guarded * 1e3:.2f} ms | {ratio:.3f}x | 1.10x |\n"
    print(text)
    (HERE / "results.md").write_text(text)


def card_times(size: str, repeats: int) -> tuple[float, float]:
    """Mean time of a plain step, and the time from the bad loss to the card."""
    steps, cards = [], []
    for _ in range(repeats):
        times, _ = run_script("one_failure.py", SIZES[size], guarded=False)
        steps.append(statistics.mean(t["ended"] - t["began"] for t in times[2:]))
        times, card_at = run_script("one_failure.py", SIZES[size], guarded=True)
        failing = next(t for t in times if not t["finite"])
        if card_at is None:
            raise SystemExit("no card appeared on stderr")
        # A guard that looks when the loss is made has its say before the script can take the time.
        known = min(failing["loss_known"], failing["began"] + steps[-1])
        cards.append(card_at - known)
    return statistics.median(steps), statistics.median(cards)


def settled_times(kind: str, repeats: int) -> tuple[float, float, float]:
    """Median CPU time of a settled step, plain and guarded, and the median of the pairs' ratios."""
    pairs = []
    for repeat in range(repeats):
        medians = {}
        for guarded in (bool(repeat % 2), not repeat % 2):
            times, _ = run_script("every_step_fails.py", [kind], guarded)
            medians[guarded] = statistics.mean(times[SETTLED:])
        pairs.append((medians[False], medians[True]))
    plain, guarded_time = (statistics.median(column) for column in zip(*pairs, strict=True))
    return plain, guarded_time, statistics.median(guarded / plain for plain, guarded in pairs)


def run_script(script: str, options: list[str], guarded: bool) -> tuple[list[Any], float | None]:
    """What the script wrote about its steps, and when (monotonic clock) the first card's first line came."""
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder) / "times.json"
        guard = ["-m", "ampguard", "run", "--out", f"{folder}/run"] if guarded else []
        command = [sys.executable, *guard, str(HERE / script), str(times), *options]
        card_at = None
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            lines = []
            for line in process.stderr or ():
                lines.append(line)
                if card_at is None and line.startswith("error["):
                    card_at = time.monotonic()
        if process.returncode:
            raise SystemExit(f"exit status {process.returncode}: {' '.join(command)}\n{''.join(lines)}")
        return json.loads(times.read_text()), card_at


if __name__ == "__main__":
    main()
