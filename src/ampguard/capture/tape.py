"""The glue tape: the few operators that run outside every module, between a forward pass and `backward()`.

It is a dispatch mode, entered when a root module returns and left before anything else of weight begins: another root
module, backward, an optimizer, a batch fetch. Modes are a stack: if the script has put one of its own on top of ours,
ours stays where it is and only passes operators through until it is on top again.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ampguard import compat
from ampguard.capture.record import torch_rng_states

if TYPE_CHECKING:
    from ampguard.capture.recorder import FlightRecorder


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
    """Records operators into the flight recorder while it is on the stack."""

    def __init__(self, recorder: FlightRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._left = 0
        self._on_stack = False
        self._inference = False
        self._thread = 0
        self._facts: dict[Any, _Facts] = {}

    def enter(self, limit: int) -> None:
        """Start taping, at most `limit` operators."""
        if self._on_stack:
            self._left = limit
        elif (
            limit > 0
            and not self._recorder.counting
            and not self._recorder.barrier.is_hiding
            and compat.dispatch_depth() == 0
            and not compat.in_functorch()
        ):
            self._left = limit
            self._inference = torch.is_inference_mode_enabled()
            self.begin()
            self._on_stack = True
            self._recorder.barrier.own_modes = 1
            self._thread = threading.get_ident()

    def leave(self) -> None:
        """Stop taping; take the mode off the stack if nothing of the script's is on top of it."""
        if not self._on_stack:
            return
        self._left = 0
        if torch.is_inference_mode_enabled() != self._inference:
            return  # the end of an inference-mode region puts back the dispatch state of its beginning, ours with it
        if threading.get_ident() == self._thread and compat.is_top_dispatch_mode(self):
            self.end()
            self._on_stack = False
            self._recorder.barrier.own_modes = 0

    def abandon(self) -> None:
        """In a forked child: pass operators through until the process ends."""
        self._left = 0

    def overwritten(self, func: Any) -> frozenset[int]:
        """Positions of the arguments that `func` writes to."""
        return (self._facts.get(func) or self._learn(func)).writes

    def is_view(self, func: Any) -> bool:
        """Whether `func` returns a view of its first argument."""
        return (self._facts.get(func) or self._learn(func)).is_view

    def _learn(self, func: Any) -> _Facts:
        writes = frozenset(
            i
            for i, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        is_read = func is torch.ops.aten._local_scalar_dense.default
        is_bookkeeping = func.namespace == "profiler"
        is_plain = not (writes or is_random or is_read or is_bookkeeping)
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        facts = self._facts[func] = _Facts(writes, is_view, is_random, is_read, is_bookkeeping, is_plain)
        return facts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder = self._recorder
        kwargs = kwargs or {}
        if self._left <= 0 or recorder.paused or not recorder.active:
            return func(*args, **kwargs)
        facts = self._facts.get(func) or recorder.barrier.call(self._learn, func)
        if facts is None or facts.is_bookkeeping:
            return func(*args, **kwargs)
        if facts.is_read:
            value = func(*args, **kwargs)
            recorder.barrier.call(recorder.read, args[0], value)
            return value
        self._left -= 1
        if self._left == 0:
            recorder.barrier.call(recorder.tape_exhausted)
        if facts.is_plain and recorder.live is None:
            return self._plain(func, args, kwargs)
        return self._with_care(func, args, kwargs, facts)

    def _plain(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The common case, in one go after the operator ran."""
        recorder = self._recorder
        try:
            output = func(*args, **kwargs)
        except BaseException as error:
            op = recorder.barrier.call(recorder.tape_op, func, args, kwargs, None)
            if op is not None:
                recorder.barrier.call(recorder.glue_raised, op, error)
            raise
        recorder.barrier.call(recorder.tape_finished, func, args, kwargs, output)
        return output

    def _with_care(self, func: Any, args: Any, kwargs: Any, facts: _Facts) -> Any:
        """An operator of which something must be kept before it runs, or that is traced live."""
        recorder = self._recorder
        rng = recorder.barrier.call(torch_rng_states) if facts.is_random else None
        op = recorder.barrier.call(recorder.tape_op, func, args, kwargs, rng)
        try:
            live = recorder.live
            if live is not None and op is not None:
                with live.watch(op):
                    output = func(*args, **kwargs)
            else:
                output = func(*args, **kwargs)
        except BaseException as error:
            if op is not None:
                recorder.barrier.call(recorder.glue_raised, op, error)
            raise
        if op is not None:
            recorder.barrier.call(recorder.taped, op, output)
        return output
