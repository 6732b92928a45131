"""`ampguard compare --eval`: what other precisions do to the outputs of an evaluation, read from a float32 run's folder."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from ampguard.compare.course import OUTPUT
from ampguard.compare.runs import Subject, run_command, run_environment, what_happened
from ampguard.compare.table import plain_lines
from ampguard.errors import RunFolderError
from ampguard.report.differences import Difference
from ampguard.report.store import read_report

SCHEMA = "ampguard.compare-eval/1"
COLUMNS = ("module", "class", "precision", "error", "of its inputs", "not finite", "step")
SHOWN = 20


class Evaluation(msgspec.Struct, frozen=True):
    """The evaluation calls of a float32 run, each made again in the other precisions. `modules`: the worst first."""

    status: int
    calls: int
    precisions: tuple[str, ...]
    modules: tuple[Difference, ...]
    could_not: tuple[str, ...] = ()
    folder: str = ""
    trouble: str | None = None

    def of_whole_models(self) -> list[Difference]:
        """What comes out of the model itself, in each precision."""
        return [d for d in self.modules if not d.module]


def run_evaluation(subject: Subject, precisions: Sequence[str], folder: Path) -> Evaluation:
    """Run the script once, in float32, with its evaluation calls made again in `precisions`."""
    target = folder / "fp32"
    command = run_command(subject, "fp32", target, "--compare-eval", ",".join(precisions))
    with (folder / f"fp32-{OUTPUT}").open("wb") as output:
        done = subprocess.run(
            command, env=run_environment(subject), stdout=output, stderr=subprocess.STDOUT, check=False
        )
    found = evaluation_of(target, done.returncode)
    if found.trouble is None:
        return found
    return msgspec.structs.replace(found, trouble=what_happened(found.trouble, target, done.returncode))


def evaluation_of(folder: Path, status: int) -> Evaluation:
    """Read what a run left. One that left nothing readable is an evaluation with `trouble`."""
    try:
        run: Any = read_report(folder).run
    except RunFolderError as error:
        return Evaluation(status, 0, (), (), folder=str(folder), trouble=str(error))
    told = run.get("evaluation", {}) if isinstance(run, dict) else {}
    found = msgspec.convert(told.get("modules", []), tuple[Difference, ...])
    precisions, could_not = tuple(told.get("precisions", ())), tuple(run.get("could_not", ()))
    return Evaluation(status, told.get("calls", 0), precisions, found, could_not, str(folder))


def print_evaluation(found: Evaluation, console: Console | None = None) -> None:
    """The worst modules as a table, and what it means for the model's own outputs, on stdout."""
    console = console or Console(highlight=False, markup=False, emoji=False, force_jupyter=False)
    for line in lines_of(found):
        console.print(line, soft_wrap=True)


def lines_of(found: Evaluation) -> list[str]:
    """As text; where nothing was evaluated, why not."""
    if not found.calls:
        why = found.trouble or "the script called no model under no_grad, in inference mode or in eval mode"
        return [f"nothing was compared: {why}", *told(found)]
    if not found.modules:
        why = (
            "no call could be made again"
            if found.could_not
            else "in float32 itself no output of the evaluation is finite"
        )
        return [f"nothing was compared: {why}", *told(found)]
    lines = plain_lines([COLUMNS, *(row_of(d) for d in found.modules[:SHOWN])])
    hidden = len(found.modules) - SHOWN
    if hidden > 0:
        lines.append(f"... and {hidden} more, all better (--format json has them)")
    calls = "1 evaluation call" if found.calls == 1 else f"{found.calls} evaluation calls, each"
    lines += ["", f"{calls} with the same weights and inputs in every precision"]
    return [*lines, *(in_words(d) for d in found.of_whole_models()), *told(found)]


def row_of(d: Difference) -> tuple[str, ...]:
    lost = f"{d.lost:.2%}" if d.lost else "-"
    return (
        d.module or "(the model)",
        d.kind,
        d.precision,
        "-" if _is_all_lost(d) else f"{d.error:.2%}",
        f"{d.input_error:.2%}",
        lost,
        str(d.step),
    )


def _is_all_lost(d: Difference) -> bool:
    """Whether nothing is left of which an error could be told."""
    return d.lost == 1.0 and d.error == 0.0


def in_words(d: Difference) -> str:
    """What a precision does to a model's outputs."""
    if _is_all_lost(d):
        return f"  {d.precision}: no element of the outputs of {d.kind} is finite any more"
    lost = f", and {d.lost:.2%} of the elements are no longer finite" if d.lost else ""
    return f"  {d.precision}: outputs of {d.kind} differ by {d.error:.2%} at most{lost}"


def told(found: Evaluation) -> list[str]:
    lines = [f"  not compared: {what}" for what in found.could_not]
    if found.status:
        lines.append(f"  the script ended with status {found.status}")
    return [*lines, f"run: {found.folder}"]


def as_json(found: Evaluation) -> bytes:
    """All of it."""
    return msgspec.json.format(msgspec.json.encode({"schema": SCHEMA, **msgspec.to_builtins(found)}), indent=2)
