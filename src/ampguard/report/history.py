"""The run's history: per step what was measured, in `history.sqlite` in the run folder.

What stands in the file, and how it is read; `history_writer.py` writes it.

    steps        one row an iteration; NULL is "not measured". A value that was not finite is NULL as well, and its
                 column is named in `nonfinite`: no mean taken over a column ever holds an infinity
    activations  (a view of `peaks` and `places`) the largest |x| that an operator returned in a sampled step
    events       what happened now and then: incidents, forecasts, suspicions
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ampguard.errors import RunFolderError

HISTORY_NAME = "history.sqlite"

STEP_COLUMNS = ("step", "loss", "scale", "grad_norm", "skipped", "update_ratio", "seconds", "nonfinite")


class StepRow(NamedTuple):
    """What was measured of one iteration; None is "not measured".

    `loss`: the sum of the losses that were differentiated. `scale`: the loss scale that the iteration used.
    `grad_norm`: of the unscaled gradients. `update_ratio`: ||update|| / ||weights||, of a few weights.
    """

    step: int
    loss: float | None = None
    scale: float | None = None
    grad_norm: float | None = None
    skipped: bool | None = None
    update_ratio: float | None = None
    seconds: float | None = None


class ActivationRow(NamedTuple):
    """The largest |x| that an operator returned in a sampled step."""

    step: int
    module: str | None
    op: str
    file: str | None
    line: int | None
    dtype: str
    max_abs: float


class EventRow(NamedTuple):
    """Something worth a note, `detail` in words."""

    step: int
    kind: str
    detail: str


def read_history(path: Path) -> History:
    """Open the history of a run folder (or one file) for reading. Raises `RunFolderError` that says what is wrong."""
    file = path / HISTORY_NAME if path.is_dir() else path
    if not file.is_file():
        raise RunFolderError(f"there is no history at {file}")
    with contextlib.ExitStack() as unless_opened:
        try:
            database = sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0)
            unless_opened.callback(database.close)
            database.execute("PRAGMA trusted_schema = OFF")
            database.execute("PRAGMA query_only = ON")
            for table in ("steps", "peaks", "places", "events"):
                database.execute(f"SELECT * FROM {table} LIMIT 1").fetchall()
        except sqlite3.Error as error:
            raise RunFolderError(f"{file} is not a history of ampguard's: {error}") from error
        unless_opened.pop_all()
    return History(file, database)


class History:
    """A history on disk. Reading it runs no code: it is numbers and text."""

    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self.path = path
        self._database = database

    def __enter__(self) -> History:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._database.close()

    def steps(self, first: int = 0) -> Iterator[StepRow]:
        """The iterations from `first` on, in order; what was not finite comes back as NaN."""
        columns = ", ".join(STEP_COLUMNS)
        for *values, nonfinite in self._rows(f"SELECT {columns} FROM steps WHERE step >= ? ORDER BY step", first):
            bad = nonfinite.split(",") if isinstance(nonfinite, str) else ()
            named: list[Any] = [
                math.nan if name in bad else value for name, value in zip(STEP_COLUMNS, values, strict=False)
            ]
            named[4] = None if named[4] is None else bool(named[4])
            yield StepRow(*named)

    def activations(self, module: str | None = None) -> Iterator[ActivationRow]:
        """The sampled maxima, in order; of one module where it is named."""
        query = (
            "SELECT p.step, q.module, q.op, q.file, q.line, q.dtype, p.max_abs FROM peaks p JOIN places q "
            "ON p.place = q.place WHERE ? IS NULL OR q.module = ? ORDER BY p.step, p.place"
        )
        return (ActivationRow(*row) for row in self._rows(query, module, module))

    def events(self) -> Iterator[EventRow]:
        return (EventRow(*row) for row in self._rows("SELECT step, kind, detail FROM events ORDER BY step, rowid"))

    def _rows(self, query: str, *values: Any) -> Iterator[tuple[Any, ...]]:
        try:
            yield from self._database.execute(query, values)
        except sqlite3.Error as error:
            raise RunFolderError(f"cannot read the history {self.path}: {error}") from error
