"""What a long run's history takes up on disk and what it costs to write and to read.

A million steps are written as a run would write them: a row a step, with the sampled columns filled now and then, and
the sampled maxima of 64 operators. Prints a table and writes results.md beside this file.

Run `python bench/history/run.py`, or with `--steps 50000` for a rough look.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

from ampguard.report.history import ActivationRow, StepRow, read_history
from ampguard.report.history_writer import HistoryWriter

HERE = Path(__file__).parent
GOAL_MB = 300
SAMPLED_EVERY = 50
PLACES = 64


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the history of a long run.")
    parser.add_argument("--steps", type=int, default=1_000_000)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as name:
        text = table(Path(name), steps)
    print(text)
    if steps >= 1_000_000:
        (HERE / "results.md").write_text(text)


def table(folder: Path, steps: int) -> str:
    problems: list[str] = []
    writer = HistoryWriter(folder, problems.append)
    appended = write(writer, steps)
    started = time.perf_counter()
    writer.close(wait_s=120)
    closing = time.perf_counter() - started
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    started = time.perf_counter()
    with read_history(folder) as history:
        read = sum(1 for _ in history.steps())
        peaks = sum(1 for _ in history.activations())
    reading = time.perf_counter() - started
    assert not problems, problems
    assert read == steps
    return (
        "# The history of a long run\n\nWritten by `bench/history/run.py`.\n\n"
        "| steps | sampled maxima | on disk | goal | the training waits, a step | closing | reading all |\n"
        "|---|---|---|---|---|---|---|\n"
        f"| {steps} | {peaks} | {size:.1f} MB | {GOAL_MB} MB | {appended / steps * 1e6:.2f} us | {closing:.2f} s "
        f"| {reading:.1f} s |\n"
    )


def write(writer: HistoryWriter, steps: int) -> float:
    """Write as a training would, at most some 20,000 steps a second; return the seconds spent in the writer's calls."""
    spent = 0.0
    numbers = random.Random(0)
    for step in range(steps):
        sampled = step % SAMPLED_EVERY == 0
        row = StepRow(
            step,
            numbers.gauss(2.0, 0.1),
            65536.0,
            numbers.random() if sampled else None,
            False,
            numbers.random() * 1e-3 if sampled else None,
            numbers.random() * 0.01,
        )
        started = time.perf_counter()
        writer.step(row)
        if step % (SAMPLED_EVERY * 4) == 0:
            for place in range(PLACES):
                writer.activation(
                    ActivationRow(
                        step, f"blocks.{place}.attn", "aten.bmm.default", "/home/me/train.py", place, "float16", 1e3
                    )
                )
        spent += time.perf_counter() - started
        if step % 10_000 == 9_999:
            time.sleep(0.5)
    return spent


if __name__ == "__main__":
    main()
