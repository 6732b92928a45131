"""What a tool claimed about a case, held against the truth, column by column."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Literal

import msgspec

from ampguard.incident import Incident, Report, Severity

from .op_names import same_op
from .truth import Case, Truth

COLUMNS = ("found", "step", "mode", "cause", "module", "op", "line", "fix")


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to "why did my run break?". A field that the tool does not speak of is absent.

    `ops` may hold full ATen overloads or the looser names that other tools print; `modules` the names that it gave.
    """

    found: bool
    severity: Severity | None = None
    step: int | None = None
    mode: Literal["train", "eval"] | None = None
    cause: str | None = None
    modules: tuple[str | None, ...] = ()
    ops: tuple[str, ...] = ()
    file: str | None = None
    code: str | None = None
    verified_fixes: tuple[str, ...] = ()
    ranks: tuple[int, ...] | None = None
    note: str = ""


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table. A column is True, False, or None where the case (or the tool) leaves it out."""

    case: str
    kind: Literal["fault", "healthy"]
    found: bool | None = None
    step: bool | None = None
    mode: bool | None = None
    cause: bool | None = None
    module: bool | None = None
    op: bool | None = None
    line: bool | None = None
    fix: bool | None = None
    false_alarm: bool | None = None
    same_exit: bool | None = None
    note: str = ""

    @property
    def is_perfect(self) -> bool:
        cells = [getattr(self, column) for column in COLUMNS]
        return False not in cells and not self.false_alarm and self.same_exit is not False


def claim_of(report: Report) -> Claim:
    """What an ampguard report answers: its first incident, as docs/diagnosis.md promises."""
    if not report.incidents:
        return Claim(found=False)
    first: Incident = report.incidents[0]
    return Claim(
        found=any(incident.severity != "info" for incident in report.incidents),
        severity=first.severity,
        step=first.step,
        mode=first.mode,
        cause=first.cause,
        modules=(first.module,),
        ops=() if first.op is None else (first.op,),
        file=first.location.file if first.location else None,
        code=first.location.code.strip() if first.location else None,
        verified_fixes=tuple(fix.action for fix in first.fixes if fix.verified is True),
        ranks=tuple(first.evidence.get("ranks", (first.rank,))),
        note=_in_words(first),
    )


def score(case: Case, claim: Claim, *, same_exit: bool | None = None, speaks_of: Iterable[str] = COLUMNS) -> Score:
    """Hold a claim against the case. `speaks_of`: the columns that the tool's output can fill at all."""
    if case.truth is None:
        return Score(case=case.name, kind="healthy", false_alarm=claim.found, same_exit=same_exit, note=claim.note)
    cells = _cells(case.truth, claim)
    spoken = {column: cells[column] for column in speaks_of}
    return Score(case=case.name, kind="fault", same_exit=same_exit, note=claim.note, **spoken)


def _cells(truth: Truth, claim: Claim) -> dict[str, bool | None]:
    """Every column of a fault. Nothing is right about a failure that was not found."""
    named_line = claim.file is not None and PurePath(claim.file).name == PurePath(truth.file).name
    right = {
        "step": claim.step in truth.steps and _right_ranks(truth, claim),
        "mode": claim.mode == truth.mode,
        "cause": claim.cause in truth.cause,
        "module": any(name in truth.module for name in claim.modules),
        "op": any(same_op(said, accepted) for said in claim.ops for accepted in truth.op if accepted)
        or (None in truth.op and not claim.ops),
        "line": named_line and claim.code in truth.lines,
        "fix": any(action in truth.fixes for action in claim.verified_fixes),
    }
    found = claim.severity in truth.severity if claim.severity is not None else claim.found
    cells: dict[str, bool | None] = {"found": found}
    cells |= {column: found and value for column, value in right.items()}
    if not truth.fixes:
        cells["fix"] = None  # a replay cannot show one: not asked for
    return cells


def _right_ranks(truth: Truth, claim: Claim) -> bool:
    """Whether a claim that speaks of ranks names those of the truth."""
    return truth.ranks is None or claim.ranks is None or sorted(claim.ranks) == sorted(truth.ranks)


def share(scores: Sequence[Score], column: str) -> tuple[int, int]:
    """(right, asked) over the rows that have this column."""
    cells = [getattr(row, column) for row in scores]
    return sum(cell is True for cell in cells), sum(cell is not None for cell in cells)


def _in_words(incident: Incident) -> str:
    where = (
        f"{PurePath(incident.location.file).name}: {incident.location.code.strip()}" if incident.location else "no line"
    )
    fixes = ",".join(fix.action for fix in incident.fixes if fix.verified) or "none"
    ranks = incident.evidence.get("ranks", [incident.rank])
    when = f"step {incident.step} {incident.mode}" + (f" ranks {ranks}" if ranks != [0] else "")
    module = "null" if incident.module is None else repr(incident.module)
    return f"{incident.cause} | {when} | {module} | {incident.op} | {where} | verified: {fixes}"
