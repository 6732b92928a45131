"""How early the forecast speaks, and whether it is silent on runs that stay within float16.

Each growing run is first run plainly, to see in which step its loss really stops being finite, then under guard. Each
healthy run is run under guard. Prints the tables and writes results.md beside this file.

Run `python bench/forecast/run.py`, or with `--only PATTERN` for some of the runs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import math
import tempfile
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import torch
from growing import GROWING
from healthy import HEALTHY

import ampguard
from ampguard.incident import Report
from ampguard.report.history import read_history

HERE = Path(__file__).parent
Run = Callable[[], Iterator[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the forecast.")
    parser.add_argument("--only", default="*")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    text = "# The forecast\n\nWritten by `bench/forecast/run.py`.\n\n"
    text += "".join(f"{line}\n" for line in tables(only))
    if only == "*":
        (HERE / "results.md").write_text(text)


def tables(only: str) -> Iterator[str]:
    yield from shown(
        "| growing run | overflows at step | forecast at step | steps early | it said | share of the run ahead |",
        "|---|---|---|---|---|---|",
        (growing_row(name, run) for name, run in GROWING.items() if fnmatch(name, only)),
    )
    yield ""
    yield from shown(
        "| healthy run | steps | samples | largest activation | forecasts and other incidents |",
        "|---|---|---|---|---|",
        (healthy_row(name, run) for name, run in HEALTHY.items() if fnmatch(name, only)),
    )


def shown(head: str, rule: str, rows: Iterator[str]) -> Iterator[str]:
    for line in itertools.chain([head, rule], rows):
        print(line, flush=True)
        yield line


def growing_row(name: str, run: Run) -> str:
    truth = len(until_bad(run)) - 1
    report, losses, _, _ = guarded(run)
    assert len(losses) - 1 == truth, "the guard changed the run"
    said = next((i for i in report.incidents if "forecast_at_step" in i.evidence or i.evidence.get("forecast")), None)
    if said is None:
        return f"| {name} | {truth} | none | | | |"
    step = said.evidence.get("forecast_at_step", said.step)
    left = said.evidence.get("forecast_steps_left", said.evidence.get("steps_left"))
    early = truth - step
    return f"| {name} | {truth} | {step} | {early} | in about {left} steps | {early / truth:.0%} |"


def healthy_row(name: str, run: Run) -> str:
    report, losses, largest, samples = guarded(run)
    said = ", ".join(f"{i.cause} ({i.severity}, step {i.step})" for i in report.incidents) or "none"
    return f"| {name} | {len(losses)} | {samples} | {largest:.0f} | {said} |"


def until_bad(run: Run) -> list[float]:
    torch.manual_seed(0)
    losses = []
    for loss in run():
        losses.append(loss)
        if not math.isfinite(loss):
            break
    return losses


def guarded(run: Run) -> tuple[Report, list[float], float, int]:
    """The report, the losses, the largest sampled activation and the number of sampled steps."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()) as err:
        with ampguard.watch(out=Path(folder) / "run") as session:
            losses = until_bad(run)
        assert "fault of its own" not in err.getvalue(), err.getvalue()
        with read_history(Path(folder) / "run") as history:
            peaks = list(history.activations())
    assert session.report is not None
    return session.report, losses, max((p.max_abs for p in peaks), default=0.0), len({p.step for p in peaks})


if __name__ == "__main__":
    main()
