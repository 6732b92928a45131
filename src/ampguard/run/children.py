"""Processes that the script starts itself (`torch.multiprocessing.spawn`, `multiprocessing.Process`): those that run the
script's own code are given a guard, those of a library (DataLoader's workers, pools, managers) are let alone.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ampguard.capture.patches import Patches
from ampguard.capture.protocol.script_lines import is_library_file
from ampguard.run.child import GivenGuard, GuardedFunction, GuardedRun

_TORCHS_SPAWN = "torch.multiprocessing.spawn"


class ChildProcesses:
    """Gives each process of the script's a guard that reports into this run's folder."""

    def __init__(self, folder: Path, options: object, seed: int | None = None) -> None:
        self._folder = folder
        self._options = options
        self._seed = seed
        self._patches = Patches()
        self._pid = os.getpid()
        self._given: weakref.WeakSet[BaseProcess] = weakref.WeakSet()
        self._attempt = -1
        self._number = 0

    def install(self) -> None:
        """From now on."""
        self._patches.replace(BaseProcess, "start", self._watch_start)

    def undo(self) -> None:
        """No longer."""
        self._patches.undo()

    def still_running(self) -> int:
        """How many of those with a guard have not ended: the script leaves it to Python to wait for them."""
        return sum(process.is_alive() for process in list(self._given))

    def _watch_start(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def start(process: BaseProcess) -> None:
            with self._guarded(process):
                return original(process)

        return start

    @contextlib.contextmanager
    def _guarded(self, process: Any) -> Iterator[None]:
        """While it is copied into the child, the process has a guard; here it is as it was."""
        is_torchs, before = False, None
        with contextlib.suppress(Exception):  # an unusual kind of process: it starts as it is
            is_torchs = getattr(process._target, "__module__", None) == _TORCHS_SPAWN
            if os.getpid() == self._pid and (is_torchs or is_scripts(process)):
                before = process._args
                given = self._give(process, before[1] if is_torchs else None)
                if is_torchs:  # inside its handler of exceptions, which keeps no more than their text
                    process._args = (GuardedFunction(before[0], given), *before[1:])
                else:
                    process.run = GuardedRun(process, given)
        try:
            yield
        finally:
            if before is not None and is_torchs and hasattr(process, "_args"):
                process._args = before
            elif before is not None:
                vars(process).pop("run", None)

    def _give(self, process: BaseProcess, index: int | None) -> GivenGuard:
        if not any(child in self._given for child in multiprocessing.active_children()):
            self._attempt, self._number = self._attempt + 1, 0
        number = self._number if index is None else index
        self._number = max(self._number, number) + 1
        self._given.add(process)
        return GivenGuard(self._folder, number, self._attempt, pickle.dumps(self._options), self._seed)


def is_scripts(process: Any) -> bool:
    """Whether the process runs code of the script's, and not of Python's or of an installed library's."""
    run = type(process).run
    what = process._target if run is BaseProcess.run else run
    while isinstance(what, functools.partial):
        what = what.func
    if what is None:
        return False
    module = getattr(what, "__module__", None) or type(what).__module__
    if module in ("__main__", "__mp_main__"):
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and not is_library_file(file)


def processes_made() -> int:
    """How many processes this one has made by `multiprocessing`."""
    module = sys.modules.get("multiprocessing.process")
    counter = re.fullmatch(r"count\((\d+)\)", repr(getattr(module, "_process_counter", None)))
    return int(counter.group(1)) - 1 if counter is not None else 0


def going_on(running: int) -> str:
    """What is said at the end of a script whose own processes have yet to compute."""
    which = "a process that it started is" if running == 1 else f"{running} processes that it started are"
    return f"the script has ended, {which} still running: what is found there is told there, and added to the report"


def unwatched(made: int) -> str:
    """What is said at the end of a run in which nobody has computed anything under the guard."""
    each = f"--nproc-per-node {made} " if made > 1 else ""
    return (
        f"nothing was computed in this process, and the {made} that it started {'were' if made > 1 else 'was'} not watched. "
        f"Let torchrun start the ranks: torchrun {each}-m ampguard run ...; or enter ampguard.watch() in each of them"
    )
