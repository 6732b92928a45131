"""Reports on disk: written whole or not at all, and merged where several ranks wrote one each.

A run folder holds `report.json`. With several ranks each writes `rank-<N>.json` of the same schema, and every rank
that finishes merges all those present into `report.json`, so that the last one leaves the complete report.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec

from ampguard.errors import RunFolderError
from ampguard.incident import Incident, Report, from_json, status_of, to_json

REPORT_NAME = "report.json"
_RANK_FILE = re.compile(r"rank-(?P<rank>\d+)(\.restart-(?P<restart>\d+))?\.json")
_SEVERITIES = ("error", "warning", "info")


def write_report(folder: Path, report: Report) -> str | None:
    """Write `folder/report.json`. Returns None, or one line that says why it could not be written.

    Never raises: a full disk must not end a training.
    """
    return _write(folder / REPORT_NAME, report)


def write_rank_report(folder: Path, report: Report, rank: int, restart: int = 0) -> str | None:
    """Write this rank's report and merge it with those that other ranks have written so far.

    `restart` counts the launcher's attempts: those of an earlier attempt are kept. Returns None or what went wrong.
    """
    attempt = f".restart-{restart}" if restart else ""
    problem = _write(folder / f"rank-{rank}{attempt}.json", report)
    if problem is not None:
        return problem
    try:
        with locked(folder / ".merge.lock"):
            return write_report(folder, merge(_rank_reports(folder)))
    except OSError as error:
        return _why(folder / REPORT_NAME, error)


def read_report(path: Path) -> Report:
    """Read a report from its file or its run folder. Raises `RunFolderError` that says what is wrong with it."""
    file = path / REPORT_NAME if path.is_dir() else path
    try:
        return from_json(file.read_bytes())
    except OSError as error:
        raise RunFolderError(f"cannot read the report {file}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise RunFolderError(f"{file} is not a report of ampguard's: {error}") from error


def merge(reports: Sequence[Report]) -> Report:
    """One report from those of all ranks: what several ranks saw in the same step is one incident.

    `evidence["ranks"]` names the ranks that saw it. Ordered by severity, step and rank.
    """
    first = reports[0]
    incidents = tuple(_merge_incidents(incident for report in reports for incident in report.incidents))
    world_size = max(report.environment.world_size for report in reports)
    return Report(
        status=status_of(incidents),
        environment=msgspec.structs.replace(first.environment, world_size=world_size),
        steps=max(report.steps for report in reports),
        incidents=incidents,
        schema=first.schema,
        run=first.run,
    )


@contextlib.contextmanager
def locked(path: Path) -> Iterator[TextIO]:
    """Hold an exclusive lock on the file `path`, which is created; where the system has no such lock, hold none."""
    with path.open("a+") as file:
        with contextlib.suppress(ImportError, OSError):
            import fcntl  # not on Windows

            fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _merge_incidents(incidents: Iterable[Incident]) -> list[Incident]:
    same: dict[Any, list[Incident]] = {}
    for incident in incidents:
        key = (
            *(incident.cause, incident.module, incident.op, incident.dtype),
            *(incident.step, incident.mode, incident.phase),
            incident.location and (incident.location.file, incident.location.line),
        )
        same.setdefault(key, []).append(incident)
    merged = [_of_all_ranks(sorted(group, key=lambda i: (_importance(i), i.rank))) for group in same.values()]
    return sorted(merged, key=_importance)


def _of_all_ranks(group: list[Incident]) -> Incident:
    ranks = sorted({rank for incident in group for rank in incident.evidence.get("ranks", [incident.rank])})
    if len(ranks) == 1:
        return group[0]
    return msgspec.structs.replace(
        group[0],
        rank=ranks[0],
        evidence={**group[0].evidence, "ranks": ranks},
        occurrences=max(incident.occurrences for incident in group),
    )


def _importance(incident: Incident) -> tuple[int, int, int]:
    return _SEVERITIES.index(incident.severity), incident.step, incident.rank


def _rank_reports(folder: Path) -> list[Report]:
    """The reports of all ranks that left a readable one, by rank and attempt."""
    found = []
    for file in folder.glob("rank-*.json"):
        name = _RANK_FILE.fullmatch(file.name)
        with contextlib.suppress(RunFolderError):
            if name is not None:
                found.append((int(name["rank"]), int(name["restart"] or 0), read_report(file)))
    return [report for *_, report in sorted(found, key=lambda entry: entry[:2])]


def _write(path: Path, report: Report) -> str | None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(to_json(_without_nonfinite(report)))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, TypeError, ValueError) as error:
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
    """JSON has no NaN and no infinity, and would say null: spell them out in the evidence instead."""
    incidents = tuple(msgspec.structs.replace(i, evidence=_spelled_out(i.evidence)) for i in report.incidents)
    return msgspec.structs.replace(report, incidents=incidents)


def _spelled_out(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"
    if isinstance(value, dict):
        return {str(key): _spelled_out(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelled_out(inner) for inner in value]
    return value
