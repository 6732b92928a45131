"""The guard in a process that the guarded script has started. It begins where that process joins the other ranks or
begins to train; until then nothing of it is imported.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ampguard.run.held import HeldSession
    from ampguard.run.protocols import GuardSession


@dataclass(frozen=True)
class GivenGuard:
    """What a child has from its parent. `number`: of its brothers, in the order in which they were started.

    `attempt`: how often all of them had ended before. `options`: pickled, since reading them needs torch. `seed`: of its
    random numbers, where it does not go on with its parent's.
    """

    folder: Path
    number: int
    attempt: int
    options: bytes
    seed: int | None = None


class GuardedFunction:
    """What `torch.multiprocessing.spawn` calls in the child."""

    def __init__(self, function: Callable[..., Any], given: GivenGuard) -> None:
        self._function = function
        self._given = given

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        held = _begin(self._given)
        try:
            result = self._function(*args, **kwargs)
        except BaseException as error:
            _end_with(held, error)
            raise  # as it is by now: without our frames
        _end_well(held)
        return result


class GuardedRun:
    """What stands in place of a process' `run` in the child."""

    def __init__(self, process: BaseProcess, given: GivenGuard) -> None:
        self._process = process
        self._given = given

    def __call__(self) -> None:
        vars(self._process).pop("run", None)
        held = _begin(self._given)
        try:
            self._process.run()
        except BaseException as error:
            _end_with(held, error)
            raise
        _end_well(held)


def _begin(given: GivenGuard) -> HeldSession:
    from ampguard.run.held import HeldSession

    held = HeldSession(ChildSession(given))
    held.start()
    return held


def _end_with(held: HeldSession, error: BaseException) -> None:
    from ampguard.errors import StopRun
    from ampguard.run.ending import hide_our_frames

    status = held.finish(error)
    hide_our_frames(error)
    if isinstance(error, StopRun):
        sys.exit(error.status)
    if status and isinstance(error, SystemExit):
        sys.exit(status)


def _end_well(held: HeldSession) -> None:
    """The process' function has returned; the guard may have stopped it for all that, in a thread."""
    if status := held.finish(None):
        sys.exit(status)


class ChildSession:
    """Starts the child's session as soon as it is known which rank it is, or when it begins to train."""

    def __init__(self, given: GivenGuard) -> None:
        self._given = given
        self._session: GuardSession | None = None
        self._pid = os.getpid()
        self._waiting_for: list[tuple[Any, str, Any, Any]] = []

    def start(self) -> None:
        here = sys.modules.get("ampguard.run.session")
        if here is not None and (parents := here.guarding()) is not None:
            parents.abandon()  # this process was forked
        elif self._given.seed is not None:
            self._seed(self._given.seed)
        if "torch" in sys.modules:
            self._wait()
        else:
            from ampguard.run.late import AfterImport

            AfterImport("torch", self._wait).install()

    def _seed(self, seed: int) -> None:
        from ampguard.run.late import AfterImport
        from ampguard.run.seeds import seed_everything, seed_torch

        seed_everything(seed)
        if "torch" in sys.modules:
            seed_torch(seed)
        else:
            AfterImport("torch", lambda: seed_torch(seed)).install()

    def finish(self, error: BaseException | None) -> int | None:
        self._stop_waiting()
        return self._session.finish(error) if self._session is not None else None

    def leave(self) -> None:
        if self._session is not None:
            self._session.leave()

    def _wait(self) -> None:
        import torch

        for owner, name in (
            (torch.nn.Module, "__call__"),
            (torch.optim.Optimizer, "__init__"),
            (torch.Tensor, "backward"),
            (torch.autograd, "backward"),
        ):
            self._replace(owner, name, self._before)
        for module in (torch.distributed, sys.modules.get("torch.distributed.distributed_c10d")):
            if hasattr(module, "init_process_group"):
                self._replace(module, "init_process_group", self._after)

    def _replace(self, owner: Any, name: str, make: Callable[[Any, str, Callable[..., Any]], Any]) -> None:
        original = getattr(owner, name)
        replacement = make(owner, name, original)
        setattr(owner, name, replacement)
        self._waiting_for.append((owner, name, original, replacement))

    def _stop_waiting(self) -> None:
        for owner, name, original, replacement in self._waiting_for:
            if getattr(owner, name) is replacement:
                setattr(owner, name, original)
        self._waiting_for.clear()

    def _before(self, owner: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def first(*args: Any, **kwargs: Any) -> Any:
            if not self._waiting_for:  # somebody kept it
                return original(*args, **kwargs)
            self._start_session()
            return getattr(owner, name)(*args, **kwargs)

        return first

    def _after(self, owner: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def first(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self._waiting_for:
                self._start_session()
            return result

        return first

    def _start_session(self) -> None:
        self._stop_waiting()
        if os.getpid() != self._pid:  # a DataLoader's worker, say
            return
        from ampguard.run.ending import say_fault

        try:
            self._session = self._make()
            self._session.start()
        except Exception as fault:
            self._session = None
            say_fault("could not start in a process that the script has started; it runs unguarded", fault)

    def _make(self) -> GuardSession:
        from dataclasses import replace

        import torch.distributed

        from ampguard.run.folder import Launch, join_run_folder
        from ampguard.run.session import Session

        rank, size = self._given.number, self._given.number + 1
        with contextlib.suppress(AttributeError):  # a build without torch.distributed
            if torch.distributed.is_initialized():
                rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        launch = Launch(rank, size, self._given.attempt, is_child=True)
        options = pickle.loads(self._given.options)
        return Session(replace(options, joins=join_run_folder(self._given.folder, launch)))
