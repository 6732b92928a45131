"""A session that starts when the script imports torch, and not before.

Importing torch settles what a script may still want to set: OMP_NUM_THREADS, TORCH_LOGS, the allocator's options. A
guard that imported it first would change how many threads the script computes with, and so its numbers.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from ampguard.run.ending import say_fault
from ampguard.run.folder import RunFolder, reserve_run_folder
from ampguard.run.protocols import GuardSession
from ampguard.stderr import say


class LateSession:
    """Makes the run folder at once, so that a wrong `--out` is refused in time, and the session with torch."""

    def __init__(self, make: Callable[[], GuardSession], out: Path | None, script_name: str) -> None:
        self._make = make
        self._out = out
        self._script_name = script_name
        self._folder: RunFolder | None = None
        self._session: GuardSession | None = None
        self._waiting: AfterImport | None = None
        self._pid = os.getpid()

    def start(self) -> None:
        """Raises UsageError or RunFolderError where the run folder cannot be made."""
        self._folder = reserve_run_folder(self._out, self._script_name)
        if "torch" in sys.modules:
            self._start_session()
        else:
            self._waiting = AfterImport("torch", self._start_session)
            self._waiting.install()

    def finish(self, error: BaseException | None) -> int | None:
        status = None
        if self._session is not None:
            status = self._session.finish(error)
        elif self._waiting is not None and self._waiting.uninstall() and error is None:
            say("the script did not import torch; nothing was watched")
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.path.rmdir()  # only where nothing was written
        return status

    def leave(self) -> None:
        if self._session is not None:
            self._session.leave()

    def _start_session(self) -> None:
        if os.getpid() != self._pid:  # a forked child imports torch: the guard is its parent's
            return
        try:
            session = self._make()
            session.start()
        except Exception as fault:
            say_fault("could not start; the script runs unguarded", fault)
        else:
            self._session = session


class AfterImport(MetaPathFinder):
    """Calls `then` as soon as the module `name` was imported, whoever imports it; leaves no trace in the module."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def install(self) -> None:
        sys.meta_path.insert(0, self)

    def uninstall(self) -> bool:
        """Stop waiting. True where the module has not been imported until now."""
        if self not in sys.meta_path:
            return False
        sys.meta_path.remove(self)
        return True

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec, as the other finders have it. (Libraries ask for it without importing anything.)"""
        if fullname != self._name:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target) if finder is not self else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _ThenLoader(spec.loader, self._imported)
                return spec
        return None

    def _imported(self) -> None:
        if self.uninstall():
            self._then()


class _ThenLoader(Loader):
    def __init__(self, loader: Any, then: Callable[[], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
