"""What each framework says and does about its fault cases when it is alone, beside what ampguard says.

python -m bench.frameworks.outcomes                    # every case of bench/faults in a framework; outcomes.md
python -m bench.frameworks.outcomes --only '*fabric*'  # some anew; the others' rows stay

Each case is run twice, in a process of its own: as it is (`bare.py` looks at the weights at the end), and under
`ampguard run`. Nothing in the table is typed by hand: a script's output gives one telling line, by `telling_line`.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

if not __package__:  # started as a file: make `bench` and a not installed ampguard importable
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(root / "src")]
    __package__ = "bench.frameworks"

from bench.faults.run import fresh
from bench.faults.scoring import COLUMNS, Score, claim_of, score
from bench.faults.tools import Run, Status, copy_case, launcher, run_command
from bench.faults.truth import Case, load_cases
from bench.frameworks.bare import Ending

from ampguard.incident import Incident, Report, from_json

HERE = Path(__file__).resolve().parent
FRAMEWORKS = {
    "PyTorch Lightning": ("*lightning*",),
    "Lightning Fabric": ("*fabric*",),
    "HF Accelerate": ("*accelerate*",),
    "timm": ("*-timm-*",),
    "MAE's engine": ("*-mae-*",),
    "Swin, SimMIM, VMamba": ("*-swin-*", "*simmim*", "q-accumulation-unscales-*", "*vmamba*"),
    "detectron2, FastReID": ("*-d2-*", "*-reid-*"),
    "HF Trainer": ("*-trainer-*", "hf-t5-*"),
    "DDP, two ranks": ("*-ddp-*",),
}
"""Whose loop a case has: the first that one of its patterns fits."""

RAISED = re.compile(r"^(?:\[rank\d+\]:)?\s*((?:\w+\.)*\w*(?:Error|Exception)\b:?.*)$", re.MULTILINE)
NOT_A_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:nan|inf)(?![\w.])", re.IGNORECASE)
WARNED = re.compile(r"\w*Warning: .*")
LONGEST = 110


class Row(msgspec.Struct, frozen=True):
    """One case: how it ends alone, and what ampguard answers."""

    framework: str
    case: str
    kind: str
    broken: str
    ended: str
    says: str
    weights: str
    answer: str
    verdict: str


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.frameworks.outcomes", description="Frameworks alone.")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases whose name matches")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds that one run may take")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    rows = {row.case: row for row in kept_rows()}
    for case in load_cases(args.only):
        framework = framework_of(case.name)
        if framework is None:
            continue
        if missing := case.missing():
            print(f"{case.name}: left out, needs {', '.join(missing)}", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory(prefix="frameworks-") as folder:
            rows[case.name] = row = row_of(framework, case, Path(folder), args.timeout)
        print(f"{case.name}: {row.ended}; {row.says}; {row.weights}\n    {row.answer} [{row.verdict}]", flush=True)
        keep(list(rows.values()))
    return 0


def framework_of(name: str) -> str | None:
    """The framework whose loop a case has, None where it has a plain one."""
    fits = (f for f, patterns in FRAMEWORKS.items() if any(fnmatch(name, pattern) for pattern in patterns))
    return next(fits, None)


def row_of(framework: str, case: Case, room: Path, timeout: float) -> Row:
    alone, endings = run_alone(case, fresh(room / "alone"), timeout)
    report, status = run_guarded(case, fresh(room / "guarded"), timeout)
    first = report.incidents[0] if report is not None and report.incidents else None
    marks = score(case, claim_of(report), same_exit=status == alone.status) if report is not None else None
    return Row(
        framework=framework,
        case=case.name,
        kind=case.kind,
        broken=f"{case.truth.cause[0]}, step {case.truth.steps[0]}" if case.truth is not None else "nothing",
        ended="ran to its end" if alone.status == 0 else f"exit status {alone.status}",
        says=telling_line(alone.output),
        weights=weights_of(endings),
        answer=answer_of(first),
        verdict="no report" if marks is None else verdict_of(marks),
    )


def run_alone(case: Case, room: Path, timeout: float) -> tuple[Run, list[Ending]]:
    """The script without a guard, and what each rank's weights were when it ended."""
    record = room / "ending.json"
    command = [*launcher(case), "-m", "bench.frameworks.bare", str(record), *case.command]
    run = run_command(command, copy_case(case, room), timeout)
    return run, [msgspec.json.decode(path.read_bytes(), type=Ending) for path in sorted(room.glob("ending*.json"))]


def run_guarded(case: Case, room: Path, timeout: float) -> tuple[Report | None, Status]:
    out = room / "run"
    command = [*launcher(case), "-m", "ampguard", "run", "--out", str(out), *case.command]
    run = run_command(command, copy_case(case, room), timeout)
    try:
        return from_json((out / "report.json").read_bytes()), run.status
    except (OSError, msgspec.DecodeError):
        return None, run.status


def telling_line(output: str) -> str:
    """What a person would see: the exception, else the first line with a NaN or an Inf in it, else a warning."""
    if "Traceback (most recent call last)" in output and (raised := RAISED.findall(output)):
        own = [line for line in raised if "ChildFailedError" not in line]
        return f"raises `{shortened((own or raised)[-1])}`"
    for line in output.splitlines():
        if NOT_A_NUMBER.search(line):
            return f"prints `{shortened(line)}`"
    if warned := WARNED.search(output):
        return f"warns `{shortened(warned[0])}`"
    return "nothing"


def weights_of(endings: list[Ending]) -> str:
    """What the optimizers' tensors were at the end."""
    if not endings:
        return "not known"
    first = endings[0]
    words = []
    if first.nonfinite:
        words.append(f"{first.nonfinite} of {first.tensors} not finite")
    if first.unmoved:
        words.append(f"{first.unmoved} of {first.tensors} never moved")
    if len({ending.checksum for ending in endings}) > 1:
        words.append("differ between ranks")
    if first.made < first.attempted:
        words.append(f"{first.attempted - first.made} of {first.attempted} updates skipped")
    return "; ".join(words) or "finite"


def answer_of(first: Incident | None) -> str:
    if first is None:
        return "no incident"
    line = f"{Path(first.location.file).name}: `{shortened(first.location.code.strip(), 60)}`" if first.location else ""
    fixes = [fix.action for fix in first.fixes if fix.verified]
    op = f"`{first.op}`" if first.op is not None else ""
    parts = [f"{first.severity}[{first.cause}] step {first.step}", op, line]
    return ", ".join(part for part in parts if part) + (f"; verified: {', '.join(fixes)}" if fixes else "")


def verdict_of(marks: Score) -> str:
    """Right, or what of the answer the case's truth does not accept."""
    if marks.kind == "healthy":
        return "false alarm" if marks.false_alarm else "right"
    if not marks.found:
        return "not found"
    wrong = [column for column in COLUMNS if getattr(marks, column) is False]
    return f"wrong: {', '.join(wrong)}" if wrong else "right"


def shortened(text: str, longest: int = LONGEST) -> str:
    """One line of a table's cell."""
    text = " ".join(text.replace("`", "'").replace("|", "\\|").split())
    return text if len(text) <= longest else text[: longest - 3] + "..."


def kept_rows() -> list[Row]:
    path = HERE / "outcomes.json"
    return msgspec.json.decode(path.read_bytes(), type=list[Row]) if path.exists() else []


def keep(rows: list[Row]) -> None:
    """Keep the rows, and write the table of all that were ever run here."""
    names = list(FRAMEWORKS)
    rows = sorted(rows, key=lambda row: (names.index(row.framework), row.kind, row.case))
    (HERE / "outcomes.json").write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")
    (HERE / "outcomes.md").write_text(markdown(rows), encoding="utf-8")


def markdown(rows: list[Row]) -> str:
    faults = [row for row in rows if row.kind == "fault"]
    healthy = [row for row in rows if row.kind == "healthy"]
    right = sum(row.verdict == "right" for row in faults)
    silent = sum(row.ended == "ran to its end" and row.says == "nothing" for row in faults)
    lines = [
        "# What the frameworks say by themselves",
        "",
        "Written by `python -m bench.frameworks.outcomes`; "
        + ", ".join(versions())
        + ", CPU, one thread. Each line is a"
        " case of `bench/faults`, run as it is and under `ampguard run`. *says*: the exception, else the first printed"
        " line that holds a NaN or an Inf, else a warning. *weights*: the tensors that the optimizers hold, at the end.",
        "",
        f"Faults: {len(faults)}. Alone, {silent} run to their end and say nothing at all. ampguard's first incident is"
        f" right in everything that is asked in {right}.",
        "",
    ]
    for framework in FRAMEWORKS:
        some = [row for row in faults if row.framework == framework]
        if some:
            lines += [f"## {framework}", "", "| case | what breaks | alone | says | weights | ampguard | which is |"]
            lines += ["|---|---|---|---|---|---|---|", *map(table_line, some), ""]
    alarms = [row.case for row in healthy if row.verdict != "right"]
    lines += [f"Healthy cases: {len(healthy)}; false alarms of ampguard: {', '.join(alarms) or 'none'}.", ""]
    return "\n".join(lines)


def table_line(row: Row) -> str:
    cells = (row.case, row.broken, row.ended, row.says, row.weights, row.answer, row.verdict)
    return "| " + " | ".join(cells) + " |"


def versions() -> list[str]:
    """Of PyTorch and of the frameworks that are installed."""
    found = []
    for name in ("torch", "lightning", "transformers", "accelerate", "timm"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
