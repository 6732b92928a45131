"""A run that the guard stops has stopped, whatever the script makes of the exception, and in whichever thread it trains."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ampguard
import warm
from ampguard.report.store import read_report

SOURCES = Path(__file__).parents[2] / "src"

TRAINING = """
import concurrent.futures, sys, threading, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def step(number):
    loss = model(torch.rand(8, 4)).square().mean()
    if number in bad:
        loss = (loss - loss).log()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(number, flush=True)
def train(n=8):
    for number in range(n):
        step(number)
bad = (3,) if "nan" in sys.argv else ()
"""
IN_A_THREAD = "thread = threading.Thread(target=train)\nthread.start()\nthread.join()\nprint('main')\n"
BARE_EXCEPT = """
for number in range(8):
    try:
        step(number)
    except:
        print("caught")
print("main")
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def call(body: str, *options: str, words: tuple[str, ...] = ("nan",)) -> subprocess.CompletedProcess[str]:
        (tmp_path / "train.py").write_text(TRAINING + body)
        env = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "ampguard", "run", "--out", "out", *options, "train.py", *words]
        return warm.run(command, cwd=tmp_path, env=env, timeout=240)

    return call


def test_stop_in_a_thread(run: Run, tmp_path: Path) -> None:
    done = run(IN_A_THREAD, "--on-nonfinite", "stop")
    assert (done.returncode, done.stdout) == (3, "0\n1\n2\nmain\n")
    assert "Traceback" not in done.stderr
    assert "StopRun" not in done.stderr
    (incident,) = read_report(tmp_path / "out").incidents
    assert incident.cause == "domain-error"


def test_steps_in_a_thread(run: Run, tmp_path: Path) -> None:
    done = run(IN_A_THREAD, "--steps", "2", words=())
    assert (done.returncode, done.stdout) == (0, "0\n1\nmain\n")
    assert done.stderr == "ampguard: 2 steps, no incident\nreport: out/report.json\n"


def test_what_else_ends_a_thread_is_shown(run: Run) -> None:
    """Before the guard stops the run, and behind it, by the hook of the script's."""
    broken = "def broken():\n    raise KeyError('lost')\n"
    of_another = "other = threading.Thread(target=broken)\nother.start()\nother.join()\n"
    own_hook = "threading.excepthook = lambda args: print('own', args.exc_type.__name__)\n"
    body = broken + own_hook + of_another + IN_A_THREAD + of_another
    done = run(body, "--on-nonfinite", "stop")
    assert (done.returncode, done.stdout) == (3, "own KeyError\n0\n1\n2\nmain\nown KeyError\n")


def test_stop_in_a_pools_thread(run: Run) -> None:
    """The exception reaches the main thread there if it asks; here it does not."""
    done = run(
        "with concurrent.futures.ThreadPoolExecutor(1) as pool:\n    pool.submit(train)\nprint('main')",
        *("--on-nonfinite", "stop"),
    )
    assert (done.returncode, done.stdout) == (3, "0\n1\n2\nmain\n")


@pytest.mark.parametrize("ending", ["", "sys.exit(0)", "sys.exit(5)"])
def test_a_bare_except_does_not_go_on_behind_stop(run: Run, tmp_path: Path, ending: str) -> None:
    done = run(BARE_EXCEPT + ending, "--on-nonfinite", "stop")
    assert (done.returncode, done.stdout) == (3, "0\n1\n2\n" + 5 * "caught\n" + "main\n")
    assert done.stderr.count("its further iterations are refused") == 1
    report = read_report(tmp_path / "out")
    assert (report.steps, len(report.incidents)) == (3, 1)


def test_a_bare_except_does_not_go_on_behind_the_steps_asked_for(run: Run) -> None:
    done = run(BARE_EXCEPT, "--steps", "3", words=())
    assert (done.returncode, done.stdout) == (0, "0\n1\n2\n" + 5 * "caught\n" + "main\n")
    assert done.stderr == "ampguard: 3 steps, no incident\nreport: out/report.json\n"


def test_a_bare_except_does_not_go_on_behind_too_many_steps_held_off(run: Run) -> None:
    done = run("bad = range(100)\n" + BARE_EXCEPT.replace("range(8)", "range(14)"), "--on-nonfinite", "skip")
    assert done.returncode == 3
    assert done.stdout.count("caught") == 5
    assert done.stderr.count("10 steps in a row were not finite; the run ends here") == 1


@pytest.mark.parametrize(("value", "status"), [("nan", 3), ("0", 0)])
def test_an_error_that_is_found_at_the_end_counts_as_well(run: Run, value: str, status: int) -> None:
    """The last loss is not differentiated: it is looked at when the script is over."""
    last = f"train(3)\nloss = model(torch.full((8, 4), float('{value}'))).square().mean()\n"
    assert run(last, "--on-nonfinite", "stop").returncode == status


def test_an_exception_of_the_scripts_own_keeps_its_traceback(run: Run) -> None:
    done = run("try:\n    train()\nexcept:\n    raise KeyError('lost') from None", "--on-nonfinite", "stop")
    assert done.returncode == 3
    assert "KeyError: 'lost'" in done.stderr


def test_a_process_of_the_scripts_that_trains_in_a_thread(run: Run) -> None:
    in_a_process = (
        "def go():\n    thread = threading.Thread(target=train)\n    thread.start()\n    thread.join()\n"
        "if __name__ == '__main__':\n    import multiprocessing\n"
        "    process = multiprocessing.get_context('fork').Process(target=go)\n"
        "    process.start()\n    process.join()\n    print('ended', process.exitcode)\n"
    )
    done = run(in_a_process, "--on-nonfinite", "stop")
    assert (done.returncode, done.stdout) == (0, "0\n1\n2\nended 3\n")


def test_watch_stops_a_thread_and_gives_its_hook_back(tmp_path: Path) -> None:
    weight = torch.zeros(3, 1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    made: list[int] = []

    def train() -> None:
        for number in range(6):
            optimizer.zero_grad()
            (weight.sum() / (number - 2) if number == 2 else weight.sum() * 2).backward()
            optimizer.step()
            made.append(number)

    hook = threading.excepthook
    with ampguard.watch(out=tmp_path / "run", on_nonfinite="stop") as session:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert made == [0, 1]
    assert threading.excepthook is hook
    assert session.report is not None
    assert session.report.status == "incidents"
