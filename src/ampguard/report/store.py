"""Reports on disk: written whole or not at all, and merged where several ranks wrote one each.

A run folder holds `report.json`. With several ranks each writes `rank-<N>.json` of the same schema and then sees to it
that `report.json` holds it: it merges all that are there, or leaves that to a rank that is at it already and looks for
new ones before it goes. Nobody waits longer than `MERGE_WITHIN_S` for another rank.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

import msgspec

from ampguard.errors import RunFolderError
from ampguard.incident import Report, from_json, to_json
from ampguard.report.merging import merge

REPORT_NAME = "report.json"
_RANK_FILE = re.compile(r"rank-(?P<rank>\d+|main)(\.restart-(?P<restart>\d+))?\.json")
_MERGED = ".merged"
"""A file that was written when the last merge began."""

MERGE_ROUNDS = 8
"""How often a rank that merges looks for what has come meanwhile."""

MERGE_WITHIN_S = 10.0
"""Longest wait for a rank that is merging."""

LOCK_WITHIN_S = 300.0
"""Longest wait for the others at the start of a run, when each puts its name down."""


def write_report(folder: Path, report: Report) -> str | None:
    """Write `folder/report.json`. Returns None, or one line that says why it could not be written.

    Never raises: a full disk must not end a training.
    """
    return _write(folder / REPORT_NAME, report)


def write_rank_report(
    folder: Path, report: Report, rank: int | None, restart: int = 0, within_s: float = MERGE_WITHIN_S
) -> str | None:
    """Write this rank's report and merge it with those that other ranks have written so far.

    `rank` None: of the process that started the ranks itself and is none of them.
    `restart` counts the launcher's attempts: those of an earlier attempt are kept. `within_s`: how long to wait for a
    rank that is merging. Returns None or what went wrong.
    """
    attempt = f".restart-{restart}" if restart else ""
    own = folder / f"rank-{'main' if rank is None else rank}{attempt}.json"
    problem = _write(own, report)
    if problem is not None:
        return problem
    try:
        os.utime(own)  # it came to be there now, and not when the first byte was written
        return _see_merged(folder, own, within_s)
    except OSError as error:
        return _why(folder / REPORT_NAME, error)


def _see_merged(folder: Path, own: Path, within_s: float) -> str | None:
    """Wait until `report.json` holds what is in `own`, and merge where nobody else is at it.

    To look costs two questions to the file system, however many ranks there are.
    """
    deadline, pause = time.monotonic() + within_s, 0.02
    while not _is_merged(folder, own):
        with (folder / ".merge.lock").open("a+") as file:
            if _lock(file):
                return None if _is_merged(folder, own) else _merge_all(folder)
        if (
            time.monotonic() > deadline
        ):  # whoever has the lock is slow, or stopped; it looks for new files before it goes
            return None
        time.sleep(pause * _jitter.uniform(0.5, 1.0))
        pause = min(1.0, 2 * pause)
    return None


def _merge_all(folder: Path) -> str | None:
    """Merge all that is there, again where more has come meanwhile. To be called with the lock."""
    before: dict[str, int] | None = None
    began = folder / f".merging-{os.getpid()}"
    for _ in range(MERGE_ROUNDS):
        began.write_bytes(b"")
        present = _rank_files(folder)
        problem = write_report(folder, _merged(folder, present)) if present != before else None
        if problem is not None:
            return problem
        began.replace(folder / _MERGED)
        if present == before:
            break
        before = present
    return None


def _is_merged(folder: Path, own: Path) -> bool:
    """Whether the last merge began after `own` was written, by the file system's own clock."""
    try:
        return own.stat().st_mtime_ns < (folder / _MERGED).stat().st_mtime_ns
    except OSError:
        return False


def read_report(path: Path) -> Report:
    """Read a report from its file or its run folder. Raises `RunFolderError` that says what is wrong with it."""
    file = path / REPORT_NAME if path.is_dir() else path
    try:
        return from_json(file.read_bytes())
    except OSError as error:
        raise RunFolderError(f"cannot read the report {file}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise RunFolderError(f"{file} is not a report of ampguard's: {error}") from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[TextIO]:
    """Hold an exclusive lock on the file `path`, which is created; where the system has no such lock, hold none.

    Raises TimeoutError where another process does not let go of it.
    """
    deadline, pause = time.monotonic() + LOCK_WITHIN_S, 0.005
    with open(path, "r+", opener=lambda name, flags: os.open(name, flags | os.O_CREAT, 0o666)) as file:
        while not _lock(file):
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, f"another process has held {path.name} for {LOCK_WITHIN_S:.0f} s")
            time.sleep(pause * _jitter.uniform(0.5, 1.0))
            pause = min(1.0, 1.5 * pause)
        yield file


_jitter = random.Random()  # its own: the script's stream of random numbers is not ours


def _lock(file: TextIO) -> bool:
    """Lock a file until it is closed. False where another process has it; True where the system knows no locks."""
    try:
        import fcntl  # not on Windows

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return True
    return True


def _rank_files(folder: Path) -> dict[str, int]:
    """The files of all ranks, and when each was written (ns)."""
    files = sorted(file for file in folder.glob("rank-*.json") if _RANK_FILE.fullmatch(file.name))
    return {file.name: file.stat().st_mtime_ns for file in files}


def _merged(folder: Path, names: Iterable[str]) -> Report:
    """The reports of all ranks that left a readable one, by rank and attempt, as one."""
    found = []
    for name in names:
        match = _RANK_FILE.fullmatch(name)
        with contextlib.suppress(RunFolderError):
            if match is not None:
                rank = None if match["rank"] == "main" else int(match["rank"])
                found.append((rank, int(match["restart"] or 0), read_report(folder / name)))
    found.sort(key=lambda entry: (entry[0] is None, *entry[:2]))
    return merge([report for *_, report in found], [rank for rank, *_ in found])


def _write(path: Path, report: Report) -> str | None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(to_json(_without_nonfinite(report)))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (ArithmeticError, OSError, TypeError, ValueError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        return _why(path, error)
    return None


def _why(path: Path, error: Exception) -> str:
    if isinstance(error, OSError):
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
    else:
        reason = f"{type(error).__name__}: {error}"
    return f"the report could not be written to {path}: {reason}"


def _without_nonfinite(report: Report) -> Report:
    """JSON has no NaN and no infinity, and would say null: spell them out in the evidence instead. So are integers of
    more than 64 bits, which readers of JSON do not know."""
    incidents = tuple(msgspec.structs.replace(i, evidence=_spelled_out(i.evidence)) for i in report.incidents)
    return msgspec.structs.replace(report, incidents=incidents)


def _spelled_out(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return str(value)
    if isinstance(value, dict):
        return {str(key): _spelled_out(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelled_out(inner) for inner in value]
    return value
