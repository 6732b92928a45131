"""Writing a run's history: the training only appends to a queue, and twice a second what waits there is written.

By a thread of its own where the process has threads already, so that neither a slow disk nor a lock is ever waited for. In a
process without any a first thread would cost every lock of the training (`ampguard.threads`): there the training's own thread
writes, one statement a batch and without a sync of the disk, and a locked file waits for its next turn. In WAL mode what was
written survives `kill -9`. If the disk is full, the file stays locked or is deleted it is said once, and the run goes on without
a history.
"""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ampguard.report.history import HISTORY_NAME, STEP_COLUMNS, ActivationRow, StepRow
from ampguard.threads import is_single_threaded

WRITE_EVERY_S = 0.5
WAITING_ROWS = 1 << 16
"""Rows kept in memory while the file cannot be written; beyond it the history is given up."""
ROWS_A_STATEMENT = 256
LOCKED_FOR_S = 20.0
RESTS_WITHIN_S = 1.0
MAX_PEAKS = 1 << 21
MAX_EVENTS = 1 << 16

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

FAILURES = (sqlite3.Error, OSError, OverflowError)


class HistoryWriter:
    """Writes a run's history. Nothing here raises or waits, except `close` for a moment."""

    def __init__(self, folder: Path, on_problem: Callable[[str], None], rank: int | None = None) -> None:
        self.path = folder / (HISTORY_NAME if rank is None else f"history-rank-{rank}.sqlite")
        self._on_problem = on_problem
        self._waiting: deque[tuple[str, Any]] = deque(maxlen=WAITING_ROWS)
        self._places: dict[tuple[Any, ...], int] = {}
        self._peaks = self._events = 0
        self._is_ending = threading.Event()
        self._has_failed = False
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._database: sqlite3.Connection | None = None
        """The open file of whoever writes without a thread."""
        self._due = 0.0
        """When the next rows are to be written without a thread."""
        self._locked_since: float | None = None
        self._write_here()
        _writing.add(self)

    def step(self, row: StepRow) -> None:
        """Note one iteration."""
        self._waiting.append(("steps", row))
        if self._thread is None and time.monotonic() >= self._due:
            self._write_here()

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
            if self._thread is None and time.monotonic() >= self._due:
                self._write_here()

    def rest(self) -> None:
        """The process is about to fork: no thread of ours may hold a lock then, and no open file go to the child."""
        if os.getpid() != self._pid:
            return
        if self._thread is not None:
            self._is_ending.set()
            self._thread.join(RESTS_WITHIN_S)
        self._close_here()

    def go_on(self) -> None:
        """The process has forked, and this is the parent."""
        if os.getpid() == self._pid and self._thread is not None and not self._has_failed:
            self._is_ending.clear()
            if not self._thread.is_alive():
                self._begin()

    def close(self, wait_s: float = 5.0) -> None:
        """Write what is waiting. In a forked child: nothing, the history is its parent's."""
        _writing.discard(self)
        if os.getpid() != self._pid:
            return
        if self._thread is None:
            self._write_last(wait_s)
            return
        self._is_ending.set()
        if self._waiting and not self._thread.is_alive():
            self._begin()  # it ended late, behind a fork
        self._thread.join(wait_s)

    # --- in the caller's thread ---------------------------------------------------------------------------------------

    def _write_here(self) -> None:
        """Write what waits, or have it written by a thread from now on if the process has got one."""
        self._due = time.monotonic() + WRITE_EVERY_S
        if self._has_failed or os.getpid() != self._pid:
            self._due = math.inf
        elif not is_single_threaded():
            self._close_here()
            self._begin()
        else:
            try:
                self._write_waiting(self._opened(0.0))
                self._locked_since = None
            except FAILURES as error:
                if not self._may_wait(error):
                    self._give_up(error)

    def _may_wait(self, error: Exception) -> bool:
        """Whether somebody else holds the file, and has not held it for long."""
        if not isinstance(error, sqlite3.OperationalError) or "locked" not in str(error):
            return False
        if self._locked_since is None:
            self._locked_since = time.monotonic()
        return time.monotonic() - self._locked_since < LOCKED_FOR_S

    def _write_last(self, wait_s: float) -> None:
        try:
            if not self._has_failed:
                self._write_waiting(self._opened(wait_s))
        except FAILURES as error:
            self._give_up(error)
        finally:
            self._close_here()

    def _opened(self, locked_for_s: float) -> sqlite3.Connection:
        if self._database is None:
            self._database = _create(self.path, locked_for_s)
        else:
            self._database.execute(f"PRAGMA busy_timeout = {round(locked_for_s * 1e3)}")
        return self._database

    def _close_here(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            with contextlib.suppress(sqlite3.Error):
                database.close()

    # --- the writing thread -------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name="ampguard-history", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        database = None
        try:
            database = _create(self.path, LOCKED_FOR_S)
            while not self._is_ending.wait(WRITE_EVERY_S):
                self._write_waiting(database)
            self._write_waiting(database)
        except FAILURES as error:
            self._give_up(error)
        finally:
            if database is not None:
                with contextlib.suppress(sqlite3.Error):
                    database.close()

    # --- both ---------------------------------------------------------------------------------------------------------

    def _write_waiting(self, database: sqlite3.Connection) -> None:
        """Write what waits; it waits until it is written, whatever comes between."""
        waiting = self._waiting
        if len(waiting) >= WAITING_ROWS:
            raise OSError(f"more than {WAITING_ROWS} rows are waiting")
        if _is_gone(self.path):  # SQLite goes on writing to a file that nobody finds any more
            raise OSError("it is gone, since the run folder was deleted or moved")
        rows = waiting.copy()  # the queue goes on filling meanwhile
        if not rows:
            return
        if database.in_transaction:  # a signal's handler writes the rest, and has come in between
            database.rollback()
        with database:
            for table, some in _by_table(rows).items():
                _insert(database, table, some)
        with contextlib.suppress(IndexError):
            for _ in rows:
                waiting.popleft()

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


def _by_table(rows: Iterable[tuple[str, Any]]) -> dict[str, list[tuple[Any, ...]]]:
    batches: dict[str, list[tuple[Any, ...]]] = {}
    for table, row in rows:
        batches.setdefault(table, []).append(_finite(row) if table == "steps" else row)
    return batches


def _is_gone(path: Path) -> bool:
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except OSError:  # a disk that does not answer, say
        return False
    return False


def _create(path: Path, locked_for_s: float) -> sqlite3.Connection:
    """The file, opened. Whoever has it may write: the training's threads, one after the other."""
    database = sqlite3.connect(path, timeout=locked_for_s, check_same_thread=False)
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
