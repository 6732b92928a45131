"""The history on disk: bounded, crash-safe, harmless to read, and never in the training's way."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ampguard.errors import RunFolderError
from ampguard.report import history, history_writer
from ampguard.report.history import ActivationRow, EventRow, StepRow, read_history
from ampguard.report.history_writer import HistoryWriter


@pytest.fixture(autouse=True, params=["alone", "among threads"])
def is_alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the process passes for one without other threads: the training's own writes then."""
    monkeypatch.setattr(history_writer, "is_single_threaded", lambda: request.param == "alone")
    return bool(request.param == "alone")


FULL = StepRow(0, 2.5, 65536.0, 1.5, False, 1e-3, 0.25)


def written(folder: Path, *rows: StepRow) -> list[str]:
    problems: list[str] = []
    writer = HistoryWriter(folder, problems.append)
    for row in rows:
        writer.step(row)
    writer.close()
    return problems


def test_steps_come_back_as_they_were(tmp_path: Path) -> None:
    rows = [FULL, StepRow(1), StepRow(2, 1.0, skipped=True)]

    assert written(tmp_path, *rows) == []

    with read_history(tmp_path) as run:
        assert list(run.steps()) == rows
        assert list(run.steps(first=2)) == rows[2:]


def test_activations_and_events_come_back(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, pytest.fail)
    rows = [ActivationRow(step, "blocks.1", "aten.bmm.default", "a.py", 7, "float16", 10.0 * step) for step in (1, 2)]
    other = ActivationRow(2, None, "aten.mul.Tensor", None, None, "float16", 3.0)
    for row in (*rows, other):
        writer.activation(row)
    writer.event(2, "forecast", "it grows")
    writer.close()

    with read_history(tmp_path) as run:
        assert list(run.activations()) == [*rows, other]
        assert list(run.activations("blocks.1")) == rows
        assert list(run.events()) == [EventRow(2, "forecast", "it grows")]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_no_infinity_enters_a_mean(bad: float, tmp_path: Path) -> None:
    written(tmp_path, FULL, FULL._replace(step=1, loss=bad, grad_norm=bad), FULL._replace(step=2, loss=3.5))

    database = sqlite3.connect(tmp_path / history.HISTORY_NAME)
    assert database.execute("SELECT avg(loss), avg(grad_norm), count(*) FROM steps").fetchone() == (3.0, 1.5, 3)
    assert database.execute("SELECT nonfinite FROM steps WHERE step = 1").fetchone() == ("loss,grad_norm",)
    database.close()
    with read_history(tmp_path) as run:
        row = list(run.steps())[1]
    assert row.loss is not None
    assert math.isnan(row.loss)
    assert row.scale == 65536.0


def test_kill_loses_at_most_about_a_second(tmp_path: Path) -> None:
    """A process that writes a step every millisecond is killed while it does."""
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from ampguard.report.history import StepRow\n"
        "from ampguard.report.history_writer import HistoryWriter\n"
        "writer = HistoryWriter(Path(sys.argv[1]), print)\n"
        "for step in range(100_000):\n"
        "    writer.step(StepRow(step, 1.0)); print(step, flush=True); time.sleep(0.001)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        started = time.monotonic()
        last = 0
        for line in process.stdout:
            last = int(line)
            if time.monotonic() - started > 2.5:
                break
        os.kill(process.pid, signal.SIGKILL)
        last = max([last, *(int(line) for line in process.stdout.read().splitlines() if line.isdigit())])

    with read_history(tmp_path) as run:
        steps = [row.step for row in run.steps()]
    assert steps == list(range(len(steps)))
    assert last > 50
    per_second = last / 2.5
    assert len(steps) >= last - 1.5 * per_second


def test_full_disk_is_said_once_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(history_writer, "_insert", full)
    problems: list[str] = []
    writer = HistoryWriter(tmp_path, problems.append)
    writer.step(FULL)
    time.sleep(3 * history_writer.WRITE_EVERY_S)
    for step in range(1000):
        writer.step(FULL._replace(step=step))
    writer.close()

    assert len(problems) == 1
    assert "disk is full" in problems[0]
    assert "goes on without it" in problems[0]


def test_locked_file_never_holds_up_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_writer, "LOCKED_FOR_S", 0.5)
    problems: list[str] = []
    writer = HistoryWriter(tmp_path, problems.append)
    time.sleep(0.3)
    locker = sqlite3.connect(tmp_path / history.HISTORY_NAME, isolation_level=None)
    locker.execute("BEGIN EXCLUSIVE")
    started = time.perf_counter()
    for step in range(2000):
        writer.step(FULL._replace(step=step))
    assert time.perf_counter() - started < 0.5
    for _ in range(3):
        time.sleep(0.6)
        writer.step(FULL._replace(step=2000))
    locker.close()
    writer.close()
    assert len(problems) == 1


def test_a_file_that_is_locked_for_a_while_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_writer, "WRITE_EVERY_S", 0.05)
    writer = HistoryWriter(tmp_path, pytest.fail)
    writer.step(StepRow(0))
    until = time.monotonic() + 20
    while not (tmp_path / history.HISTORY_NAME).exists():
        assert time.monotonic() < until
    locker = sqlite3.connect(tmp_path / history.HISTORY_NAME, isolation_level=None, timeout=10.0)
    locker.execute("BEGIN IMMEDIATE")
    for step in range(1, 5):
        time.sleep(0.06)
        writer.step(StepRow(step))
    locker.close()
    writer.step(StepRow(5))
    writer.close()
    with read_history(tmp_path) as run:
        assert [row.step for row in run.steps()] == [0, 1, 2, 3, 4, 5]


def test_what_was_interrupted_is_written_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes in the middle of a batch where the training's own thread writes."""
    monkeypatch.setattr(history_writer, "is_single_threaded", lambda: True)
    insert, calls = history_writer._insert, []

    def interrupted(*args: Any) -> None:
        insert(*args)
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(history_writer, "_insert", interrupted)
    writer = HistoryWriter(tmp_path, pytest.fail)
    writer._due = 0.0
    with pytest.raises(KeyboardInterrupt):
        writer.event(0, "note", "once")
    writer.close()
    with read_history(tmp_path) as run:
        assert list(run.events()) == [EventRow(0, "note", "once")]


def test_a_thread_takes_over_once_the_process_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = True
    monkeypatch.setattr(history_writer, "is_single_threaded", lambda: alone)
    monkeypatch.setattr(history_writer, "WRITE_EVERY_S", 0.0)
    writer = HistoryWriter(tmp_path, pytest.fail)
    writer.step(StepRow(0))
    assert writer._thread is None
    alone = False
    writer.step(StepRow(1))
    assert writer._thread is not None
    assert writer._database is None
    writer.close()
    with read_history(tmp_path) as run:
        assert [row.step for row in run.steps()] == [0, 1]


def test_memory_is_bounded_while_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_writer, "WRITE_EVERY_S", 60.0)
    monkeypatch.setattr(history_writer, "WAITING_ROWS", 100)
    problems: list[str] = []
    writer = HistoryWriter(tmp_path, problems.append)
    for step in range(1000):
        writer.step(FULL._replace(step=step))
    assert len(writer._waiting) == 100
    writer.close()
    assert len(problems) == 1


def test_folder_that_cannot_be_written_is_a_problem_and_no_exception(tmp_path: Path) -> None:
    assert len(written(tmp_path / "missing", FULL)) == 1


def has_a_step(folder: Path) -> bool:
    with contextlib.suppress(RunFolderError), read_history(folder) as found:
        return bool(list(found.steps()))
    return False


def test_a_folder_that_is_deleted_is_said_once(tmp_path: Path) -> None:
    problems: list[str] = []
    folder = tmp_path / "run"
    folder.mkdir()
    writer = HistoryWriter(folder, problems.append)
    writer.step(StepRow(0, loss=1.0))
    while not has_a_step(folder):
        time.sleep(0.01)
        writer.step(StepRow(0, loss=1.0))
    shutil.rmtree(folder)
    writer.step(StepRow(1, loss=1.0))
    writer.close()
    (problem,) = problems
    assert "it is gone, since the run folder was deleted or moved; the run goes on without it" in problem


def test_ranks_have_files_of_their_own(tmp_path: Path) -> None:
    for rank in (0, 1):
        writer = HistoryWriter(tmp_path, pytest.fail, rank)
        writer.step(StepRow(rank))
        writer.close()
    for rank in (0, 1):
        with read_history(tmp_path / f"history-rank-{rank}.sqlite") as run:
            assert [row.step for row in run.steps()] == [rank]


def test_a_forked_child_does_not_write(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, pytest.fail)
    writer.step(FULL)
    monkey = writer._pid
    writer._pid = -1  # what a child sees: a process id that is not its own
    writer.close()
    assert not has_a_step(tmp_path)
    writer._pid = monkey
    writer.close()
    assert has_a_step(tmp_path)
    assert writer._thread is None or not writer._thread.is_alive()


@pytest.mark.parametrize("content", [b"", b"not a database at all, whatever it says" * 100])
def test_what_is_no_history_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / history.HISTORY_NAME).write_bytes(content)
    with pytest.raises(RunFolderError, match=r"not a history"):
        read_history(tmp_path)


def test_missing_history_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no history"):
        read_history(tmp_path)


def test_reading_writes_nothing(tmp_path: Path) -> None:
    written(tmp_path, FULL)
    before = (tmp_path / history.HISTORY_NAME).read_bytes()
    with read_history(tmp_path) as run:
        list(run.steps())
        with pytest.raises(sqlite3.OperationalError):
            run._database.execute("DELETE FROM steps")
    assert (tmp_path / history.HISTORY_NAME).read_bytes() == before


def test_a_step_takes_little_room(tmp_path: Path) -> None:
    """A million steps are to fit 300 MB; bench/history measures them."""
    count = 20_000
    problems: list[str] = []
    writer = HistoryWriter(tmp_path, problems.append)
    for step in range(count):
        writer.step(StepRow(step, 0.1 + step, 65536.0, 0.3, False, None, 0.01))
    writer.close()
    assert problems == []
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert size / count < 100


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="processes do not fork here")
def test_no_thread_of_ours_is_there_while_a_process_forks(tmp_path: Path, is_alone: bool) -> None:
    """From Python 3.12 on a fork among threads is warned of, in the script's name."""
    before = threading.active_count()
    writer = HistoryWriter(tmp_path, pytest.fail)
    seen, written_in_child = os.pipe()
    for step in range(3):
        writer.step(StepRow(step))
        child = os.fork()
        if child == 0:
            os.write(written_in_child, bytes([threading.active_count()]))
            writer.step(StepRow(100 + step))
            writer.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert threading.active_count() == before + (not is_alone)
    writer.step(StepRow(3))
    writer.close()

    assert os.read(seen, 3) == bytes([1, 1, 1])
    os.close(seen)
    os.close(written_in_child)
    with read_history(tmp_path) as run:
        assert [row.step for row in run.steps()] == [0, 1, 2, 3]


def test_a_thread_that_ended_behind_a_fork_loses_nothing(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, pytest.fail)
    writer.rest()
    writer.step(FULL)
    writer.close()
    with read_history(tmp_path) as run:
        assert list(run.steps()) == [FULL]
