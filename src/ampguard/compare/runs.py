"""Run a script once a precision, each time in a process of its own, with the same seeds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ampguard.compare.course import OUTPUT, Course, course_of
from ampguard.errors import RunFolderError, UsageError
from ampguard.report.store import REPORT_NAME


@dataclass(frozen=True)
class Subject:
    """What is compared: the script's (or module's) words, and how far it is to run; None: to its end."""

    words: tuple[str, ...]
    is_module: bool = False
    steps: int | None = 200
    seed: int = 0


def run_each(subject: Subject, precisions: Sequence[str], folder: Path, say: Callable[[str], None]) -> list[Course]:
    """One run after the other: side by side they would disturb each other's times."""
    courses = []
    for precision in precisions:
        say(f"{precision}: running")
        started = time.perf_counter()
        course = _run(subject, precision, folder)
        courses.append(course)
        say(f"{precision}: {course.steps} steps in {time.perf_counter() - started:.0f} s, status {course.status}")
    return courses


def make_folder(out: Path | None, stem: str) -> Path:
    """The folder that the run folders go into; new or empty. Raises UsageError or RunFolderError."""
    folder = out or Path("ampguard-runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-compare-{stem}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"--out {folder}: is not empty; name a new folder")
    except OSError as error:
        raise RunFolderError(f"cannot make the folder {folder}: {error.strerror or error}") from error
    return folder.absolute()


def _run(subject: Subject, precision: str, folder: Path) -> Course:
    target = folder / precision
    command = run_command(subject, precision, target)
    with (folder / f"{precision}-{OUTPUT}").open("wb") as output:
        done = subprocess.run(
            command, env=run_environment(subject), stdout=output, stderr=subprocess.STDOUT, check=False
        )
    course = course_of(target, precision, done.returncode)
    if course.trouble is None:
        return course
    return msgspec.structs.replace(course, trouble=what_happened(course.trouble, target, done.returncode))


def what_happened(trouble: str, target: Path, status: int) -> str:
    """Why a run has left no report that can be read, with the last thing that it said."""
    output = target.with_name(f"{target.name}-{OUTPUT}")
    where = f"what it printed is in {output}"
    if (target / REPORT_NAME).exists():
        return f"{trouble}; {where}"
    lines = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    last = f": {lines[-1]}" if lines else ""
    return f"it ended with status {status} before it computed anything{last}; {where}"


def run_command(subject: Subject, precision: str, target: Path, *options: str) -> list[str]:
    """The guarded run of the subject under one precision."""
    command = [sys.executable, "-m", "ampguard", "run", "--precision", precision, *options]
    command += ["--steps", str(subject.steps)] if subject.steps is not None else []
    command += ["--seed", str(subject.seed), "--out", str(target)]
    return [*command, *(["-m", *subject.words] if subject.is_module else ["--", *subject.words])]


def run_environment(subject: Subject) -> dict[str, str]:
    return {**os.environ, "PYTHONHASHSEED": str(subject.seed)}
