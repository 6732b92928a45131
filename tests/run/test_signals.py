"""Ctrl-C, SIGTERM and SIGHUP: the process dies as it would without us, after the session was finished."""

from __future__ import annotations

import platform
import signal
import subprocess
import time
from collections.abc import Callable

import pytest
from workbench import Outcome, Workbench

READY = """
import os, signal, sys, time
def ready():
    print('ready', flush=True)
    for _ in range(300):
        time.sleep(0.1)  # Python lets a signal wait that comes just before one long sleep begins
"""


def signalled(
    workbench: Workbench, *words: str, signum: int = signal.SIGTERM, guarded: bool = True, **extra: str
) -> Outcome:
    """Start a script, send it a signal once it says that it is ready, and report how it ended."""
    workbench.log.unlink(missing_ok=True)
    process = subprocess.Popen(
        workbench.command(*words, guarded=guarded),
        cwd=workbench.folder,
        env=workbench.environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signum)
    stdout, stderr = process.communicate(timeout=20)
    return Outcome(process.returncode, stdout, stderr)


both = pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])


@both
def test_the_report_is_written_and_the_signal_still_is_the_cause_of_death(workbench: Workbench, signum: int) -> None:
    workbench.write("train.py", READY + "ready()")
    started = time.monotonic()
    outcome = signalled(workbench, "train.py", signum=signum)
    assert outcome == signalled(workbench, "train.py", signum=signum, guarded=False)
    assert outcome == Outcome(-signum, "", "")
    signalled(workbench, "train.py", signum=signum)
    assert workbench.session_saw() == ["start", f"finish SystemExit({128 + signum})"]
    assert time.monotonic() - started < 20


WAITS_IN_C = """
import ctypes, os, signal, sys, threading, time
def ready():
    libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    libc.pthread_mutex_lock(lock)
    threading.Timer(0.5, os.write, (1, b"ready\\n")).start()
    libc.pthread_mutex_lock(lock)  # for ever: a signal does not end it, and no Python handler runs
"""


@both
def test_a_signal_ends_a_process_that_is_blocked_in_c(workbench: Workbench, signum: int) -> None:
    workbench.write("train.py", WAITS_IN_C + "ready()")
    started = time.monotonic()
    assert signalled(workbench, "train.py", signum=signum, RANK="0") == Outcome(-signum, "", "")
    assert workbench.session_saw() == ["start", "leave"]
    assert time.monotonic() - started < 20


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="nobody can tell there")
def test_the_watcher_comes_with_the_first_thread_that_the_script_starts(workbench: Workbench) -> None:
    """A process has none from the guard: its first thread would cost every lock of the training."""
    workbench.write(
        "train.py",
        "import os, threading\n"
        "from ampguard.threads import look_for_first_thread\n"
        "count = lambda: len(os.listdir('/proc/self/task'))\n"
        "look_for_first_thread()\n"
        "print(count())\n"
        "ended = threading.Event()\n"
        "threading.Thread(target=ended.wait).start()\n"
        "look_for_first_thread()\n"
        "print(count())\n"
        "ended.set()\n",
    )
    assert workbench.guarded("train.py").stdout == "1\n3\n"


def test_a_blocked_process_with_a_handler_of_its_own_is_left_alone(workbench: Workbench) -> None:
    """It goes on waiting, as it would without us."""
    workbench.write(
        "train.py",
        WAITS_IN_C + "signal.signal(signal.SIGTERM, print)\nthreading.Timer(2.5, os._exit, (7,)).start()\nready()",
    )
    assert signalled(workbench, "train.py", RANK="0").status == 7
    assert workbench.session_saw() == ["start"]


def test_a_wakeup_file_of_the_scripts(workbench: Workbench) -> None:
    """asyncio has one. SIGTERM is then handled when the main thread comes back."""
    workbench.write(
        "train.py",
        READY + "import socket\nhere, there = socket.socketpair()\nhere.setblocking(False)\nthere.setblocking(False)\n"
        "signal.set_wakeup_fd(there.fileno())\nready()",
    )
    assert signalled(workbench, "train.py") == Outcome(-signal.SIGTERM, "", "")
    assert workbench.session_saw() == ["start", "finish SystemExit(143)"]


def test_signals_of_a_forked_child_are_its_own(workbench: Workbench, assert_same: Callable[..., Outcome]) -> None:
    workbench.write(
        "train.py",
        """
import os, signal, time
if os.fork() == 0:
    signal.signal(signal.SIGTERM, lambda *a: print("child", signal.set_wakeup_fd(-1), flush=True))
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(3)
print(os.waitstatus_to_exitcode(os.wait()[1]))
time.sleep(1.5)  # longer than a blocked process has
""",
    )
    assert assert_same("train.py").stdout == "child -1\n3\n"
    assert workbench.session_saw() == ["start", "finish None"]


def test_the_watcher_is_none_of_the_scripts_threads(workbench: Workbench, assert_same: Callable[..., Outcome]) -> None:
    workbench.write("train.py", "import threading\nprint(len(threading.enumerate()), threading.active_count())")
    assert_same("train.py")


def test_a_report_that_cannot_be_written_holds_nobody_up(workbench: Workbench) -> None:
    workbench.write("train.py", WAITS_IN_C + "ready()")
    started = time.monotonic()
    assert signalled(workbench, "train.py", SESSION_FAULT="leave", RANK="0").status == -signal.SIGTERM
    assert time.monotonic() - started < 15


@both
def test_the_scripts_own_handler_stands(workbench: Workbench, signum: int) -> None:
    workbench.write("train.py", READY + f"signal.signal({int(signum)}, lambda *a: sys.exit('saved'))\nready()")
    assert signalled(workbench, "train.py", signum=signum) == Outcome(1, "", "saved\n")
    assert workbench.session_saw() == ["start", "finish SystemExit('saved')"]


@both
def test_a_signal_looks_unhandled_to_the_script(workbench: Workbench, signum: int) -> None:
    """Lightning, for one, installs its handlers only where it finds the default."""
    workbench.write(
        "train.py",
        f"import signal\nprint(signal.getsignal({int(signum)}) in (None, signal.SIG_DFL))\n"
        f"print(signal.signal({int(signum)}, print) == signal.SIG_DFL)",
    )
    assert workbench.guarded("train.py").stdout == workbench.plain("train.py").stdout == "True\nTrue\n"


@both
def test_an_ignored_signal_stays_ignored(workbench: Workbench, signum: int) -> None:
    workbench.write("train.py", f"import signal\nprint(repr(signal.getsignal({int(signum)})))")
    workbench.write(
        "nohup.py",
        f"import os, signal, sys\nsignal.signal({int(signum)}, signal.SIG_IGN)\nos.execv(sys.argv[1], sys.argv[1:])",
    )
    command = workbench.command("train.py", guarded=True)
    assert "SIG_IGN" in workbench.plain("nohup.py", *command).stdout


def test_sigterm_while_threads_are_waited_for(workbench: Workbench) -> None:
    # (By then the main thread waits: a signal that comes just before it does so would be left to the watcher.)
    workbench.write("train.py", READY + "import threading\nthreading.Timer(0.5, ready).start()")
    # The thread sleeps on; SIGTERM's default action does not wait for it.
    assert signalled(workbench, "train.py").status == -signal.SIGTERM
    assert workbench.session_saw() == ["start", "finish SystemExit(143)"]


@pytest.mark.parametrize("words", [("train.py",), ("-m", "train")])
def test_ctrl_c_is_pythons(workbench: Workbench, assert_same: Callable[..., Outcome], words: tuple[str, ...]) -> None:
    workbench.write(
        "train.py",
        "import atexit, signal\natexit.register(print, 'atexit')\n"
        "try:\n    signal.raise_signal(signal.SIGINT)\nfinally:\n    print('finally')",
    )
    outcome = assert_same(*words)
    assert outcome.status == -signal.SIGINT  # a shell shows 130
    assert outcome.stdout == "finally\natexit\n"
    assert outcome.stderr.endswith("KeyboardInterrupt\n")
    assert workbench.session_saw() == ["start", "finish KeyboardInterrupt()"]


def test_ctrl_c_from_outside(workbench: Workbench) -> None:
    workbench.write("train.py", READY + "ready()")
    outcome = signalled(workbench, "train.py", signum=signal.SIGINT)
    assert outcome.status == -signal.SIGINT
    assert outcome.stderr.endswith("KeyboardInterrupt\n")
    assert workbench.session_saw() == ["start", "finish KeyboardInterrupt()"]


def test_ctrl_c_that_the_script_handles(workbench: Workbench) -> None:
    workbench.write("train.py", READY + "try:\n    ready()\nexcept KeyboardInterrupt:\n    sys.exit(4)")
    assert signalled(workbench, "train.py", signum=signal.SIGINT).status == 4


def test_ctrl_c_while_threads_are_waited_for(workbench: Workbench) -> None:
    """Python mentions it and does not wait any longer; nor do we, and the report is written.

    (A thread that is still printing then makes Python itself abort: this one writes past the buffer.)
    """
    workbench.write(
        "train.py",
        "import os, threading, time\ndef late():\n    time.sleep(0.2)\n    os.write(1, b'ready\\n')\n    time.sleep(1)\n"
        "threading.Thread(target=late).start()",
    )
    plain = signalled(workbench, "train.py", signum=signal.SIGINT, guarded=False)
    guarded = signalled(workbench, "train.py", signum=signal.SIGINT)
    assert guarded.status == plain.status
    for outcome in (plain, guarded):
        assert "KeyboardInterrupt" in outcome.stderr
        assert "ampguard" not in outcome.stderr
    assert workbench.session_saw() == ["start", "finish None"]
