"""Processes of Python's that need not import torch: forked from one that has, where a real one would cost seconds.

`warm.run` and `warm.start` take the command of a `subprocess.run` or `Popen`. The child has its own folder, environment,
`sys.path`, arguments, `__main__`, files and random numbers, and it ends as Python does: output, traceback, exit status or
signal are those of a new process. Some things differ, so a test that is about one of them starts a real process:

- `modules` are imported already when its first line runs, and so before any guard starts, and with `ampguard run` what
  that imports itself; the end of the process takes none of them apart;
- nanobind reports its objects among them as leaked, at the end of stderr: `run` takes that out;
- it computes with one thread, and its strings hash as those of the other children;
- its parent is the server that it was forked from, whose objects `gc.get_objects` leaves out.

Options of Python's own (`-W`, `-X`, `-u`) need a real process. Variables that Python or torch read while they start have
a server of their own for each value. Where there is no pidfd (not on Linux), and with AMPGUARD_TESTS_FORK=0, all
processes are real.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

TORCH = ("torch", "torch._dynamo")
"""What the first optimizer of any training imports."""
RANKS = (*TORCH, "torch.distributed.fsdp", "torch.nn.parallel")
GUARD = ("ampguard.cli.run", "ampguard.run.session")
"""What `ampguard run` imports before the first line of its script, or with torch."""

_READ_AT_START = ("PYTHON", "TORCH_", "PYTORCH_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "CUDA_", "LD_", "LC_", "LANG")
_LEAKS = re.compile(r"^nanobind: leaked (?s:.*?)refleaks\.html\n?", re.MULTILINE)
_CAN_FORK = hasattr(os, "pidfd_open") and os.environ.get("AMPGUARD_TESTS_FORK") != "0"


def run(
    command: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    check: bool = False,
    modules: Sequence[str] = TORCH,
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` with its output captured, as text."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = start(command, cwd=cwd, env=env, stdout=out, stderr=err, modules=modules)
        try:
            status = process.wait(timeout)
        except BaseException:
            process.kill()
            process.wait()
            raise
        for file in (out, err):
            file.seek(0)
        said = err.read() if isinstance(process, subprocess.Popen) else _LEAKS.sub("", err.read())
        done = subprocess.CompletedProcess(list(command), status, out.read(), said)
    if check and status:
        failed = subprocess.CalledProcessError(status, done.args, done.stdout, done.stderr)
        if sys.version_info >= (3, 11):
            failed.add_note(done.stderr[-4000:])
        raise failed
    return done


def start(
    command: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdout: IO[Any],
    stderr: IO[Any],
    modules: Sequence[str] = TORCH,
) -> subprocess.Popen[Any] | Forked:
    """`subprocess.Popen`, with files for its output; what is returned has `pid`, `wait`, `poll` and `kill`."""
    environ = dict(os.environ if env is None else env)
    if not _CAN_FORK:
        return subprocess.Popen(command, cwd=cwd, env=environ, stdout=stdout, stderr=stderr)
    assert command[0] == sys.executable
    assert not command[1].startswith("-") or command[1] in ("-m", "-c"), "options of Python's need a real process"
    read_at_start = {name: value for name, value in environ.items() if name.startswith(_READ_AT_START)}
    read_at_start.pop("PYTHONPATH", None)  # the child's own
    sources = ""
    if list(command[1:4]) == ["-m", "ampguard", "run"] and "torch" in modules:
        paths = environ.get("PYTHONPATH", "").split(os.pathsep)
        sources = next((path for path in paths if path and Path(path, "ampguard").is_dir()), "")
        modules = (*modules, *GUARD) if sources else modules
    key = (tuple(modules), sources, os.getpid(), *sorted(read_at_start.items()))
    if key not in _servers:
        _servers[key] = _Server(modules, sources, environ)
    return _servers[key].fork(list(command[1:]), str(cwd or Path.cwd()), environ, stdout.fileno(), stderr.fileno())


class Forked:
    """A child of the server, as `Popen` would show it."""

    def __init__(self, pid: int, told: IO[bytes], command: list[str]) -> None:
        self.pid = pid
        self.args = command
        self.returncode: int | None = None
        self._told = told

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not _is_readable(self._told.fileno(), timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            line = self._told.readline()
            self._told.close()
            assert line, "the server that forks has died"
            self.returncode = int(line)
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Server:
    """Lives as long as this process: it ends when our end of the socket is closed, if need be by the system."""

    def __init__(self, modules: Sequence[str], sources: str, environ: Mapping[str, str]) -> None:
        self._asking, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = {name: value for name, value in environ.items() if name != "PYTHONPATH"}
        server = str(Path(__file__).with_name("warm_server.py"))
        command = [sys.executable, server, str(theirs.fileno()), sources, *modules]
        with theirs:
            self._process = subprocess.Popen(
                command,
                env={**own, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        atexit.register(self._end, os.getpid())

    def _end(self, pid: int) -> None:
        if os.getpid() == pid:
            self._asking.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10.0)

    def fork(self, words: list[str], cwd: str, environ: dict[str, str], out: int, err: int) -> Forked:
        reading, writing = os.pipe()
        told = os.fdopen(reading, "rb", buffering=0)
        request = json.dumps({"words": words, "cwd": cwd, "environ": environ}).encode()
        with open(os.devnull, "rb") as nothing:
            socket.send_fds(self._asking, [request], [nothing.fileno(), out, err, writing])
        os.close(writing)
        line = told.readline()
        assert line, f"the server that forks has ended with {self._process.wait(10.0)}"
        return Forked(int(line), told, [sys.executable, *words])


_servers: dict[tuple[Any, ...], _Server] = {}


def _is_readable(descriptor: int, timeout: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        if poll.poll(left):
            return True
        if deadline is not None and time.monotonic() >= deadline:
            return False
