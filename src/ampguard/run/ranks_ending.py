"""A rank whose script raised because another one was gone says what that other one saw."""

from __future__ import annotations

from pathlib import Path

from ampguard.errors import RunFolderError, StopRun
from ampguard.incident import Incident
from ampguard.report.merging import in_words
from ampguard.report.store import read_report
from ampguard.stderr import say


def say_what_others_saw(folder: Path, rank: int, error: BaseException | None) -> None:
    """One line on the terminal, where this rank ended with an exception and another rank's report has an error."""
    if not isinstance(error, Exception) or isinstance(error, StopRun):
        return
    try:
        incidents = read_report(folder).incidents
    except RunFolderError:
        return
    first = next((i for i in incidents if i.severity == "error" and rank not in _ranks_of(i)), None)
    if first is not None:
        what = f"{first.cause} in step {first.step}: {first.explanation.split('. ')[0].rstrip('.')}."
        say(f"{in_words(_ranks_of(first))} saw an error before this rank ended; {what}")


def _ranks_of(incident: Incident) -> list[int]:
    return list(incident.evidence.get("ranks", [incident.rank]))
