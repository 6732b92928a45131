"""The run's history: per step what was measured, in `history.sqlite` in the run folder.

The training only appends to a queue; a thread of its own writes twice a second, one statement a batch, so neither a
slow disk nor a lock is ever waited for. In WAL mode what was written survives `kill -9`. If the disk is full, the
file stays locked or is deleted it is said once, and the run goes on without a history.

    steps        one row an iteration; NULL is "not measured". A value that was not finite is NULL as well, and its
                 column is named in `nonfinite`: no mean taken over a column ever holds an infinity
    activations  (a view of `peaks` and `places`) the largest |x| that an operator returned in a sampled step
    events       what happened now and then: incidents, forecasts, suspicions
"""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ampguard.errors import RunFolderError

HISTORY_NAME = "history.sqlite"
WRITE_EVERY_S = 0.5
WAITING_ROWS = 1 << 16
"""Rows kept in memory while the file cannot be written; beyond it the history is given up."""
ROWS_A_STATEMENT = 256
LOCKED_FOR_S = 20.0
RESTS_WITHIN_S = 1.0
MAX_PEAKS = 1 << 21
MAX_EVENTS = 1 << 16

STEP_COLUMNS = ("step", "loss", "scale", "grad_norm", "skipped", "update_ratio", "seconds", "nonfinite")
SCHEMA = """
CREATE TABLE IF NOT EXISTS steps (
    step INTEGER PRIMARY KEY, loss REAL, scale REAL, grad_norm REAL, skipped INTEGER, update_ratio REAL,
    seconds REAL, nonfinite TEXT);
CREATE TABLE IF NOT EXISTS places (
    place INTEGER PRIMARY KEY, module TEXT, op TEXT, file TEXT, line INTEGER, dtype TEXT);
CREATE TABLE IF NOT EXISTS peaks (step INTEGER, place INTEGER, max_abs REAL);
CREATE TABLE IF NOT EXISTS events (step INTEGER, kind TEXT, detail TEXT);
CREATE VIEW IF NOT EXISTS activations AS
    SELECT step, module, op, file, line, dtype, max_abs FROM peaks JOIN places USING (place);
"""


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


class HistoryWriter:
    """Writes a run's history from a thread of its own. Nothing here raises or waits, except `close` for a moment."""

    def __init__(self, folder: Path, on_problem: Callable[[str], None], rank: int | None = None) -> None:
        self.path = folder / (HISTORY_NAME if rank is None else f"history-rank-{rank}.sqlite")
        self._on_problem = on_problem
        self._waiting: deque[tuple[str, Any]] = deque(maxlen=WAITING_ROWS)
        self._places: dict[tuple[Any, ...], int] = {}
        self._peaks = self._events = 0
        self._is_ending = threading.Event()
        self._has_failed = False
        self._pid = os.getpid()
        self._begin()
        _writing.add(self)

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name="ampguard-history", daemon=True)
        self._thread.start()

    def rest(self) -> None:
        """The process is about to fork: no thread of ours may hold a lock then, and no open file go to the child."""
        if os.getpid() == self._pid:
            self._is_ending.set()
            self._thread.join(RESTS_WITHIN_S)

    def go_on(self) -> None:
        """The process has forked, and this is the parent."""
        if os.getpid() == self._pid and not self._has_failed:
            self._is_ending.clear()
            if not self._thread.is_alive():
                self._begin()

    def step(self, row: StepRow) -> None:
        """Note one iteration."""
        self._waiting.append(("steps", row))

    def activation(self, row: ActivationRow) -> None:
        """Note one sampled maximum. Beyond two million of them, none."""
        if self._peaks >= MAX_PEAKS:
            return
        self._peaks += 1
        place = tuple(row[1:6])
        number = self._places.get(place)
        if number is None:
            number = self._places[place] = len(self._places)
            self._waiting.append(("places", (number, *place)))
        self._waiting.append(("peaks", (row.step, number, row.max_abs)))

    def event(self, step: int, kind: str, detail: str) -> None:
        """Note something that happened. Beyond 65,536 of them, nothing."""
        if self._events < MAX_EVENTS:
            self._events += 1
            self._waiting.append(("events", (step, kind, detail)))

    def close(self, wait_s: float = 5.0) -> None:
        """Write what is waiting. In a forked child: nothing, the history is its parent's."""
        _writing.discard(self)
        if os.getpid() == self._pid:
            self._is_ending.set()
            if self._waiting and not self._thread.is_alive():
                self._begin()  # it ended late, behind a fork
            self._thread.join(wait_s)

    # --- the writing thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        database = None
        try:
            database = _create(self.path)
            while not self._is_ending.wait(WRITE_EVERY_S):
                self._write_waiting(database)
            self._write_waiting(database)
        except (sqlite3.Error, OSError, OverflowError) as error:
            self._give_up(error)
        finally:
            if database is not None:
                with contextlib.suppress(sqlite3.Error):
                    database.close()

    def _write_waiting(self, database: sqlite3.Connection) -> None:
        if len(self._waiting) >= WAITING_ROWS:
            raise OSError(f"more than {WAITING_ROWS} rows are waiting")
        if _is_gone(self.path):  # SQLite goes on writing to a file that nobody finds any more
            raise OSError("it is gone, since the run folder was deleted or moved")
        batches = self._taken()
        if batches:
            with database:
                for table, rows in batches.items():
                    _insert(database, table, rows)

    def _taken(self) -> dict[str, list[tuple[Any, ...]]]:
        """What is waiting, by table; the queue goes on filling meanwhile."""
        batches: dict[str, list[tuple[Any, ...]]] = {}
        with contextlib.suppress(IndexError):
            for _ in range(len(self._waiting)):
                table, row = self._waiting.popleft()
                batches.setdefault(table, []).append(_finite(row) if table == "steps" else row)
        return batches

    def _give_up(self, error: Exception) -> None:
        self._waiting = deque(maxlen=1)
        if not self._has_failed:
            self._has_failed = True
            self._on_problem(f"the history could not be written to {self.path}: {error}; the run goes on without it")


_writing: weakref.WeakSet[HistoryWriter] = weakref.WeakSet()


def _rest_while_forking() -> None:
    """Python tells of threads when a process forks (3.12), and a child may hang on what they hold."""

    def before() -> None:
        for writer in list(_writing):
            writer.rest()

    def after() -> None:
        for writer in list(_writing):
            writer.go_on()

    os.register_at_fork(before=before, after_in_parent=after)


if hasattr(os, "register_at_fork"):
    _rest_while_forking()


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


def _is_gone(path: Path) -> bool:
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except OSError:  # a disk that does not answer, say
        return False
    return False


def _create(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=LOCKED_FOR_S)
    with contextlib.ExitStack() as unless_made:
        unless_made.callback(database.close)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")  # a commit survives the death of the process without an fsync
        database.executescript(SCHEMA)
        unless_made.pop_all()
    return database


def _insert(database: sqlite3.Connection, table: str, rows: list[tuple[Any, ...]]) -> None:
    """Many rows in one statement: the interpreter's lock is given up once and not once a row."""
    width = len(rows[0])
    for first in range(0, len(rows), ROWS_A_STATEMENT):
        some = rows[first : first + ROWS_A_STATEMENT]
        marks = ",".join([f"({','.join('?' * width)})"] * len(some))
        values = [value for row in some for value in row]
        database.execute(f"INSERT OR REPLACE INTO {table} VALUES {marks}", values)


def _finite(row: StepRow) -> tuple[Any, ...]:
    """A step's row for the table: NULL in place of what is not finite, and those columns named at the end."""
    bad = [n for n, v in zip(STEP_COLUMNS, row, strict=False) if isinstance(v, float) and not math.isfinite(v)]
    if not bad:
        return (*row, None)
    return (*(None if name in bad else v for name, v in zip(STEP_COLUMNS, row, strict=False)), ",".join(bad))
