"""The fault cases: what a case folder holds, and whether what it says can be true.

A case is a folder with a training script that knows nothing of ampguard and a `truth.json` that says what breaks in it.
"""

from __future__ import annotations

import re
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import msgspec

from ampguard.incident import ACTIONS, CAUSES, Severity

CASES = Path(__file__).resolve().parent / "cases"
OVERLOAD = re.compile(r"[a-z_]\w*\.\w+\.\w+")


class Truth(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a right answer names. Every list holds the accepted alternatives, normally one."""

    step: int | list[int]
    mode: Literal["train", "eval"]
    cause: list[str]
    module: list[str | None]
    op: list[str | None]
    file: str
    line: str | list[str]
    fixes: list[str]
    severity: list[Severity] = msgspec.field(default_factory=lambda: ["warning", "error"])
    ranks: list[int] | None = None
    """With several ranks, all of those where it happened."""

    @property
    def steps(self) -> list[int]:
        return [self.step] if isinstance(self.step, int) else self.step

    @property
    def lines(self) -> list[str]:
        return [self.line] if isinstance(self.line, str) else self.line


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`truth.json`, and where it was found."""

    source: str
    report: str
    kind: Literal["fault", "healthy"]
    args: list[str] = []
    module_form: bool = False
    entry: str = "train.py"
    requires: list[str] = []
    ranks: int = 1
    truth: Truth | None = None
    folder: Path = Path()

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def command(self) -> list[str]:
        """How Python (or a guard in its place) is asked to run the script, from inside the folder."""
        return [*(["-m", self.entry] if self.module_form else [self.entry]), *self.args]

    def missing(self) -> list[str]:
        """The packages that this case needs and this machine lacks."""
        return [name for name in self.requires if find_spec(name) is None]


def load_case(folder: Path) -> Case:
    """Read a case. Raises `msgspec.ValidationError` naming the field that does not fit."""
    case = msgspec.json.decode((folder / "truth.json").read_bytes(), type=Case)
    return msgspec.structs.replace(case, folder=folder)


def load_cases(pattern: str = "*", root: Path = CASES) -> list[Case]:
    """Every case whose folder name matches `pattern` (a shell pattern, or a part of the name), in order."""
    folders = sorted(path.parent for path in root.glob("*/truth.json"))
    return [load_case(path) for path in folders if fnmatch(path.name, pattern) or pattern in path.name]


def problems(case: Case) -> list[str]:
    """What cannot be right about a case: unknown words, a line that is not there or not unique."""
    found = []
    if not case.source.startswith("https://"):
        found.append(f"source is no address: {case.source!r}")
    if not case.module_form and not (case.folder / case.entry).is_file():
        found.append(f"no script {case.entry}")
    if (case.kind == "fault") != (case.truth is not None):
        found.append(f"kind is {case.kind} and truth is {'absent' if case.truth is None else 'present'}")
    if case.truth is not None:
        found += _truth_problems(case, case.truth)
    return found


def _truth_problems(case: Case, truth: Truth) -> list[str]:
    found = [f"unknown cause {code!r}" for code in truth.cause if code not in CAUSES]
    found += [f"unknown fix {action!r}" for action in truth.fixes if action not in ACTIONS]
    found += [f"no ATen overload: {op!r}" for op in truth.op if op is not None and not OVERLOAD.fullmatch(op)]
    if not truth.op or not truth.cause or not truth.module or not truth.steps or not truth.lines:
        found.append("an empty list: nothing would be accepted")
    for path in case.folder.rglob(Path(truth.file).name):
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        found += [f"{truth.file}: {n} times {line!r}" for line in truth.lines if (n := lines.count(line)) != 1]
        return found
    return found + _library_problems(case.requires, truth)


def _library_problems(requires: list[str], truth: Truth) -> list[str]:
    """The line of a failure inside a library is the library's: `modeling_t5.py`, with or without its folders."""
    specs = [find_spec(name) for name in requires]
    rooms = [Path(spec.origin).parent for spec in specs if spec is not None and spec.origin]
    paths = [path for room in rooms for path in room.rglob(Path(truth.file).name)]
    if not paths:
        return [f"{truth.file} is neither in the case nor in a package that it requires"]
    lines = {line.strip() for path in paths for line in path.read_text(encoding="utf-8").splitlines()}
    return [f"{truth.file} has no line {line!r}" for line in truth.lines if line not in lines]
