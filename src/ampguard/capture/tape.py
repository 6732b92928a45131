"""The glue tape: the few operators that run outside every module, between a forward pass and `backward()`.

It is a dispatch mode, entered when a root module returns and left before anything else of weight begins: another root
module, backward, an optimizer, a batch fetch. Modes are a stack: if the script has put one of its own on top of ours,
ours stays where it is and only passes operators through until it is on top again.
"""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ampguard import compat
from ampguard.capture.barrier import FaultBarrier
from ampguard.capture.judge import Judge
from ampguard.capture.log import EventLog
from ampguard.capture.record import GlueOp, torch_rng_states


class Taped(Protocol):
    """Whose operators are taped: the recorder, as far as the tape knows it."""

    active: bool
    paused: bool
    counting: bool
    barrier: FaultBarrier
    log: EventLog
    judge: Judge

    @property
    def live(self) -> Watcher | None: ...
    def glue_raised(self, op: GlueOp, error: BaseException) -> None: ...
    def tape_exhausted(self) -> None: ...


class Watcher(Protocol):
    """Traces an operator while it runs."""

    def watch(self, event: GlueOp) -> AbstractContextManager[Any]: ...


@dataclass(frozen=True, slots=True)
class _Facts:
    """What taping an operator takes. `is_plain`: it neither writes to an operand nor draws random numbers."""

    writes: frozenset[int]
    is_view: bool
    is_random: bool
    is_read: bool
    is_bookkeeping: bool
    is_plain: bool


class GlueTape(compat.DispatchMode):
    """Records operators into the event log while it is on the stack."""

    def __init__(self, taped: Taped) -> None:
        super().__init__()
        self._taped = taped
        self._left = 0
        self.is_on_stack = False
        """Whether operators come by, recorded or not."""
        self._inference = False
        self._thread = 0
        self._facts: dict[Any, _Facts] = {}
        self.reads = 0
        """Numbers that the script has read from tensors while the tape was on."""

    def enter(self, limit: int) -> None:
        """Start taping, at most `limit` operators."""
        if self.is_on_stack:
            self._left = limit
        elif (
            limit > 0
            and not self._taped.counting
            and not self._taped.barrier.is_hiding
            and compat.dispatch_depth() == 0
            and not compat.in_functorch()
        ):
            self._left = limit
            self._inference = torch.is_inference_mode_enabled()
            self.begin()
            self.is_on_stack = True
            self._taped.barrier.own_modes = 1
            self._thread = threading.get_ident()

    def leave(self) -> None:
        """Stop taping; take the mode off the stack if nothing of the script's is on top of it."""
        if not self.is_on_stack:
            return
        self._left = 0
        if torch.is_inference_mode_enabled() != self._inference:
            return  # the end of an inference-mode region puts back the dispatch state of its beginning, ours with it
        if threading.get_ident() == self._thread and compat.is_top_dispatch_mode(self):
            self.end()
            self.is_on_stack = False
            self._taped.barrier.own_modes = 0

    @property
    def is_taping(self) -> bool:
        """Whether operators are being recorded."""
        return self.is_on_stack and self._left > 0

    def abandon(self) -> None:
        """In a forked child: pass operators through until the process ends."""
        self._left = 0

    def overwritten(self, func: Any) -> frozenset[int]:
        """Positions of the arguments that `func` writes to."""
        return (self._facts.get(func) or self._learn(func)).writes

    def _learn(self, func: Any) -> _Facts:
        writes = compat.positions_written(func)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        is_read = func is torch.ops.aten._local_scalar_dense.default
        is_bookkeeping = func.namespace == "profiler"
        is_plain = not (writes or is_random or is_read or is_bookkeeping)
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in compat.schema_of(func).returns)
        facts = self._facts[func] = _Facts(writes, is_view, is_random, is_read, is_bookkeeping, is_plain)
        return facts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        taped = self._taped
        kwargs = kwargs or {}
        if self._left <= 0 or taped.paused or not taped.active:
            return func(*args, **kwargs)
        facts = self._facts.get(func)
        if facts is None:
            facts = taped.barrier.call(self._learn, func)
        if facts is None or facts.is_bookkeeping:
            return func(*args, **kwargs)
        if facts.is_read:
            self.reads += 1
            value = func(*args, **kwargs)
            if not (type(value) is float and value - value == 0.0):
                taped.barrier.call(taped.judge.read, args[0], value)
            return value
        self._left -= 1
        if self._left == 0:
            taped.barrier.call(taped.tape_exhausted)
        if not facts.is_plain or taped.live is not None:
            return self._with_care(func, args, kwargs, facts)
        try:
            output = func(*args, **kwargs)
        except BaseException as error:
            op = taped.barrier.call(taped.log.add_operator, func, args, kwargs, None, sys._getframe(1))
            if op is not None:
                taped.barrier.call(taped.glue_raised, op, error)
            raise
        barrier = taped.barrier
        if barrier.is_observed():
            barrier.call(taped.log.keep_plain, func, args, kwargs, output, facts.is_view, sys._getframe(1))
        elif not barrier.tripped:
            try:
                taped.log.keep_plain(func, args, kwargs, output, facts.is_view, sys._getframe(1))
            except Exception as fault:
                barrier.trip(fault)
        return output

    def _with_care(self, func: Any, args: Any, kwargs: Any, facts: _Facts) -> Any:
        """An operator of which something must be kept before it runs, or that is traced live."""
        taped = self._taped
        op = taped.barrier.call(self._keep_before, func, args, kwargs, facts, sys._getframe(2))
        try:
            live = taped.live
            if live is not None and op is not None:
                with live.watch(op):
                    output = func(*args, **kwargs)
            else:
                output = func(*args, **kwargs)
        except BaseException as error:
            if op is not None:
                taped.barrier.call(taped.glue_raised, op, error)
            raise
        if op is not None:
            taped.barrier.call(taped.log.add_results, op, output, bool(facts.writes))
        return output

    def _keep_before(self, func: Any, args: Any, kwargs: Any, facts: _Facts, frame: Any) -> GlueOp | None:
        log = self._taped.log
        rng = torch_rng_states() if facts.is_random else None
        if facts.writes:
            args = tuple(log.copied(a) if i in facts.writes else a for i, a in enumerate(args))
        return log.add_operator(func, args, kwargs, rng, frame)
