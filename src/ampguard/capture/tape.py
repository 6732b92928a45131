"""The glue tape: the few operators that run outside every module, between a forward pass and `backward()`.

It is a dispatch mode, entered when a root module returns and left before anything else of weight begins: another root
module, backward, an optimizer, a batch fetch. Modes are a stack: if the script has put one of its own on top of ours,
ours stays where it is and only passes operators through until it is on top again.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from ampguard import compat
from ampguard.capture.record import torch_rng_states

if TYPE_CHECKING:
    from ampguard.capture.recorder import FlightRecorder

_READ = torch.ops.aten._local_scalar_dense.default


class GlueTape(compat.DispatchMode):
    """Records operators into the flight recorder while it is on the stack."""

    def __init__(self, recorder: FlightRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._left = 0
        self._on_stack = False
        self._preprocessing = False
        self._overwritten: dict[Any, frozenset[int]] = {}
        self._random: dict[Any, bool] = {}

    @property
    def is_preprocessing(self) -> bool:
        """Whether the tape is on and no module has been called in this step yet."""
        return self._on_stack and self._preprocessing

    def enter(self, limit: int, preprocessing: bool = False) -> None:
        """Start taping, at most `limit` operators."""
        self._preprocessing = preprocessing
        if self._on_stack:
            self._left = limit
        elif limit > 0 and compat.dispatch_depth() == 0 and not compat.in_functorch():
            self._left = limit
            self.__enter__()
            self._on_stack = True
            self._thread = threading.get_ident()

    def leave(self) -> None:
        """Stop taping; take the mode off the stack if nothing of the script's is on top of it."""
        if not self._on_stack:
            return
        self._left = 0
        if threading.get_ident() == self._thread and compat.is_top_dispatch_mode(self):
            self.__exit__(None, None, None)
            self._on_stack = False

    def abandon(self) -> None:
        """In a forked child: pass operators through until the process ends."""
        self._left = 0

    def overwritten(self, func: Any) -> frozenset[int]:
        """Positions of the arguments that `func` writes to."""
        known = self._overwritten.get(func)
        if known is None:
            known = frozenset(
                i
                for i, argument in enumerate(func._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            )
            self._overwritten[func] = known
        return known

    def _is_random(self, func: Any) -> bool:
        known = self._random.get(func)
        if known is None:
            known = self._random[func] = torch.Tag.nondeterministic_seeded in func.tags
        return known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorder = self._recorder
        if self._left <= 0 or recorder.paused or not recorder.active:
            return func(*args, **kwargs)
        if func is _READ:
            value = func(*args, **kwargs)
            recorder.barrier.call(recorder.read, args[0], value)
            return value
        self._left -= 1
        if self._left == 0:
            recorder.tape_exhausted()
        op = recorder.barrier.call(self._before, func, args, kwargs)
        try:
            if recorder.live is not None and op is not None:
                with recorder.live.watch(op):
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

    def _before(self, func: Any, args: Any, kwargs: Any) -> Any:
        rng = torch_rng_states() if self._is_random(func) else None
        return self._recorder.tape_op(func, args, kwargs, rng)
