"""What a script computes before it trains: class weights, a normalised data set, a noise schedule, a graph's degrees.

A value that goes bad there is only read, much later, by the first step. A function mode that is on until then looks at
what the script's own calls return, and keeps those from which bad values come: to be run again when somebody asks.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.barrier import FaultBarrier
from ampguard.capture.events.log import EventLog, versions_in
from ampguard.capture.events.operands import held_by, leaves, refs_of
from ampguard.capture.frames import is_user_code, user_line
from ampguard.capture.glue.originals import MetFunctions
from ampguard.capture.glue.preprocessing import MOVES
from ampguard.capture.glue.vanished import Vanished
from ampguard.capture.raised import is_about_numbers, is_refused, refused_tensors
from ampguard.capture.record import GlueOp, Line, Ref, StepRecord
from ampguard.compat import FunctionMode, in_functorch, storage_key, version_of
from ampguard.numerics import UNINITIALISED, is_finite

MAX_CALLS = 20_000
"""Calls that are looked at; what a script calls behind them is passed through."""

MAX_SECONDS = 0.5
"""What looking at large tensors may take in all."""

LARGE = 1 << 16
"""Elements from which on looking at a tensor is timed."""

MAX_ELEMENTS = 1 << 26
"""Elements of a tensor that is looked at."""

MAX_HELD = 1 << 22
"""Elements of what is kept alive: the operands of calls from which bad values come, and what they returned."""

PLAIN = frozenset({Tensor, nn.Parameter})

DIVISIONS = frozenset({torch.ops.aten.div, torch.ops.aten.reciprocal, torch.ops.aten.rsqrt, torch.ops.aten.pow})

GIVEN = frozenset({
    "arange", "as_tensor", "asarray", "bernoulli", "bernoulli_", "cauchy_", "exponential_", "eye",
    "fill_", "from_numpy", "frombuffer", "full", "full_like", "geometric_", "linspace", "log_normal_", "logspace",
    "masked_fill", "masked_fill_", "multinomial", "new_full", "new_ones", "new_tensor", "new_zeros", "normal",
    "normal_", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random_",
    "randperm", "scalar_tensor", "set_", "tensor", "uniform_", "zero_", "zeros", "zeros_like",
})  # fmt: skip
"""Functions whose results are constants, random numbers, or come from elsewhere: nothing goes bad in them."""


@dataclass(frozen=True, slots=True)
class _Before:
    """What a call was about to write to: whether it was finite, its value where that is small, and its version."""

    was_finite: bool
    value: Tensor | None
    version: int


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that has returned; `output` is what it wrote to, where it did (`before`)."""

    func: Any
    name: str
    args: Any
    kwargs: dict[str, Any]
    output: Any
    frame: FrameType
    before: _Before | None


class BeforeTraining(FunctionMode):
    """Knows which calls before the first step have made what is not finite, from operands that were."""

    def __init__(self, barrier: FaultBarrier) -> None:
        super().__init__()
        self.is_on = False
        """Whether this is on the stack of the thread in which it began."""
        self.log = EventLog()
        self._barrier = barrier
        self._met = MetFunctions()
        self._watches = False
        self._thread = 0
        self._left = MAX_CALLS
        self._seconds = 0.0
        self._held = 0
        self._bad: list[tuple[weakref.ref[Tensor], Tensor | None, Ref]] = []
        """What such calls have made and is not finite, held where it is small, and what the log calls it."""
        self._vanished = Vanished()
        self._uninitialised: dict[int, tuple[int, Line]] = {}
        """Memory that the script has asked for as it is: how many elements, and where."""
        self._records: list[tuple[StepRecord, list[tuple[weakref.ref[Tensor], Ref]]]] = []
        """What the tape has kept of the same kind."""

    # --- on and off ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Look from now on, unless somebody else looks, or something may be compiled."""
        if not FunctionMode.is_available or compat.function_modes_on() or compat.may_compile() or self.is_on:
            return
        self._thread = threading.get_ident()
        self.is_on = self._watches = True
        self._barrier.calls = self
        compat.push_function_mode(self)

    def end(self) -> None:
        """Look no more; leave the stack where nothing of the script's is on top."""
        self._watches = False
        if not self.is_on or threading.get_ident() != self._thread:
            return
        if not self.take_off():
            return
        self.is_on = False
        if self._barrier.calls is self:
            self._barrier.calls = None

    def abandon(self) -> None:
        """In a forked child: pass calls through."""
        self._watches = False

    # --- calls --------------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self._met.known:
            func = self._met.meet(func, sys._getframe(1))
        if not self._watches:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        frame = sys._getframe(1)
        if name in UNINITIALISED:
            made = func(*args, **kwargs)
            self._barrier.call(self._note_uninitialised, made, frame)
            return made
        if name in GIVEN or not (PLAIN.issuperset(types) and _is_asked_by_script(frame)) or in_functorch():
            return func(*args, **kwargs)
        writes = _writes(name) and bool(args)
        before = self._barrier.call(self._before_write, args[0]) if writes else None
        output = func(*args, **kwargs)
        call = _Call(func, name, args, kwargs, args[0] if writes else output, frame, before)
        if not (writes and before is None):
            self._barrier.call(self._look, call)
        return output

    def _note_uninitialised(self, made: Any, frame: FrameType) -> None:
        if type(made) is Tensor and made.is_floating_point() and made.is_cpu and is_user_code(frame.f_code):
            line = user_line(frame)
            if line is not None:
                self._uninitialised[storage_key(made)] = (made.numel(), line)

    def _before_write(self, target: Any) -> _Before | None:
        """What is about to be written to, where it can be looked at."""
        if not self._may_look_at(target):
            return None
        keeps = target.numel() <= LARGE and not target.requires_grad
        return _Before(self._is_finite(target), target.detach().clone() if keeps else None, version_of(target))

    def _look(self, call: _Call) -> None:
        """Did a call that has returned make bad values, or hand them on?"""
        self._left -= 1
        if self._left <= 0 or self._seconds > MAX_SECONDS:
            self._watches = False
            return
        results = _tensors_in(call.output)
        is_move = call.name in MOVES and not any(
            isinstance(v, torch.dtype) for v in (*call.args, *call.kwargs.values())
        )
        if not results or (is_move and not self._bad):
            return
        if compat.dispatch_modes_on() or compat.tracing_state() is not None:
            return
        bad = [tensor for tensor in results if self._may_look_at(tensor) and not self._is_finite(tensor)]
        before = call.before
        given = [*leaves((call.args if before is None else call.args[1:], call.kwargs))]
        if not bad:
            self._note_vanished(call, results, given)
            return
        known = next((ref for v in given if isinstance(v, Tensor) and (ref := self._ref_of(v)) is not None), None)
        if known is None:
            if before is not None and before.value is not None and not before.was_finite:
                known = self._ref_of(call.output)
            was_finite = before is None or before.was_finite
            is_given = is_move or not was_finite or not all(map(_is_finite, given))
            is_new = before is None and not is_move
            is_step = is_new and any(tensor.requires_grad and not tensor.is_leaf for tensor in bad)
            if known is None and is_given and not is_step:
                return  # it was given, and nobody knows from where
        self._keep(call, bad, known)

    def _note_vanished(self, call: _Call, results: list[Tensor], given: list[Any]) -> None:
        """Keep a call that is finite and was given bad values, or what was computed from them: its 0 may be 1 / Inf."""
        if not self._bad or self._vanished.is_full:
            return
        tensors = [v for v in (*given, call.output if call.before is not None else None) if isinstance(v, Tensor)]
        behind = next((ref for v in tensors if (ref := self._value_behind(v)) is not None), None)
        floating = [tensor for tensor in results if self._may_look_at(tensor)]
        if behind is None or not floating:
            return
        for tensor, ref in zip(floating, self._kept(call, floating)[0], strict=True):
            if ref is not None:
                self._vanished.note(tensor, ref, behind)

    def _value_behind(self, tensor: Tensor) -> Ref | None:
        """The bad value that a tensor is, or was computed from."""
        known = self._ref_of(tensor)
        if known is None:
            found = self._vanished.of(tensor)
            known = found[1] if found is not None else None
        return known

    def _keep(self, call: _Call, bad: list[Tensor], known: Ref | None) -> None:
        """Keep the call to be run again, where it is small; of its results, what made them bad."""
        names, is_held = self._kept(call, bad)
        for tensor, name in zip(bad, names, strict=True):
            ref = name or known
            if ref is not None:
                self._bad.append((weakref.ref(tensor), tensor if is_held else None, ref))

    def _kept(self, call: _Call, results: list[Tensor]) -> tuple[list[Ref | None], bool]:
        """Keep a call where it is small: what the log calls these results of it, and whether it is kept."""
        before, log = call.before, self.log
        size = sum(v.numel() for v in (*leaves((call.args, call.kwargs)), *results) if isinstance(v, Tensor))
        names: list[Ref | None] = [None for _ in results]
        is_held = self._held + size <= MAX_HELD
        if is_held and type(call.output) is not nn.Parameter:
            line = user_line(call.frame)
            if before is None:
                log.keep_call(call.func, call.args, call.kwargs, call.output, list(versions_in(call.args)), line)
            elif before.value is not None and (func := _as_one_operator(call)) is not None:
                versions = [before.version, *versions_in(call.args[1:])]
                log.keep_write(func, call.args, call.kwargs, versions, before.value, line, False)
            log.settle()
            names = [log.lookup(tensor) for tensor in results]
        self._held += size if is_held else 0
        return names, is_held

    def _may_look_at(self, tensor: Any) -> bool:
        return (
            type(tensor) in PLAIN
            and tensor.is_floating_point()
            and tensor.is_cpu
            and 0 < tensor.numel() <= MAX_ELEMENTS
            and compat.is_dense(tensor)
            and compat.has_values(tensor)
        )

    def _is_finite(self, tensor: Tensor) -> bool:
        if tensor.numel() < LARGE:
            return is_finite(tensor)
        started = time.perf_counter()
        answer = is_finite(tensor)
        self._seconds += time.perf_counter() - started
        return answer

    def _ref_of(self, tensor: Tensor) -> Ref | None:
        """The call that has made this tensor's bad values, as far as one is known."""
        memory = storage_key(tensor)
        for weak, held, ref in reversed(self._bad):
            one = held if held is not None else weak()
            if one is not None and (one is tensor or storage_key(one) == memory != 0):
                return ref
        return None

    # --- what the tape has kept -----------------------------------------------------------------------------------------

    def keep_from(self, log: EventLog) -> None:
        """The first step begins: of what was taped before it, keep what is not finite, for the steps to come."""
        bad: list[tuple[weakref.ref[Tensor], Ref]] = []
        given: set[int] = set()
        """Events that were given what is bad: they have not made it so."""
        for event in log.kept_since(0):
            if isinstance(event, GlueOp):
                for weak in event.outputs:
                    tensor = weak()
                    if tensor is not None and self._may_look_at(tensor) and not self._is_finite(tensor):
                        if any(ref.event in given for ref in refs_of(event)) or not all(
                            self._is_finite(held.tensor) for held in held_by(event) if self._may_look_at(held.tensor)
                        ):
                            given.add(event.index)
                            continue
                        ref = log.lookup(tensor)
                        if ref is not None:
                            bad.append((weak, ref))
        if bad:
            self._records.append((log.slice(), bad))

    # --- questions ------------------------------------------------------------------------------------------------------

    def maker_of(self, tensor: Tensor) -> tuple[StepRecord, Ref] | None:
        """The calls that have made the bad values of a tensor, and what they call it (or what its values come from)."""
        ref = self._ref_of(tensor) if self._bad else None
        if ref is not None:
            return self.log.slice(), ref
        memory = storage_key(tensor)
        for record, bad in self._records:
            for weak, ref in bad:
                one = weak()
                if one is not None and (one is tensor or storage_key(one) == memory != 0):
                    return record, ref
        return None

    def refused_by(self, error: BaseException) -> tuple[StepRecord, Ref] | None:
        """As `maker_of`, of what an error that speaks of numbers was raised over: what the script had at hand, else the
        last that was made (`svd(w / w.norm())`)."""
        if not isinstance(error, Exception) or not is_about_numbers(error):
            return None
        record = self.log.slice() if self._bad else StepRecord()
        made = [
            (one, ref) for weak, held, ref in self._bad if (one := held if held is not None else weak()) is not None
        ]
        made = [(one, ref) for one, ref in made if record.event(ref.event) is not None and is_refused(one)]
        for tensor in refused_tensors(error):
            memory = storage_key(tensor)
            for one, ref in made:
                if one is tensor or storage_key(one) == memory != 0:
                    return record, ref
            found = self.maker_of(tensor) if not self._bad else None
            if found is not None:
                return found
        return (record, made[-1][1]) if made else None

    def vanished_behind(self, tensor: Tensor) -> tuple[StepRecord, Ref, Ref] | None:
        """The calls that have made a finite tensor from a value that was not, what they call it, and that value."""
        found = self._vanished.of(tensor)
        return (self.log.slice(), *found) if found is not None else None

    def uninitialised_at(self, tensor: Tensor) -> Line | None:
        """Where the script asked for the memory of a tensor that nothing has been written to since, as far as is counted."""
        known = self._uninitialised.get(storage_key(tensor)) if version_of(tensor) == 0 else None
        return known[1] if known is not None and known[0] == tensor.numel() else None

    def bad_tensors(self) -> list[Tensor]:
        """Everything of that kind that is still there."""
        found = [held if held is not None else weak() for weak, held, _ in self._bad]
        found += [weak() for _, bad in self._records for weak, _ in bad]
        return [tensor for tensor in found if tensor is not None]


def made_by(record: StepRecord, ref: Ref) -> Iterator[GlueOp]:
    """The operator that gave a result, and those behind it."""
    waiting, seen = [ref.event], set()
    while waiting:
        event = record.event(waiting.pop())
        if isinstance(event, GlueOp) and event.index not in seen:
            seen.add(event.index)
            waiting += [behind.event for behind in refs_of(event)]
            yield event


def is_division(op: GlueOp) -> bool:
    """Whether an operator divides: an infinity that it gives is no mask, and no sentinel."""
    return getattr(op.func, "overloadpacket", None) in DIVISIONS


def _is_asked_by_script(frame: FrameType) -> bool:
    """Whether a function was called by code that is not PyTorch's, or is a function of PyTorch's that asks for itself."""
    return frame.f_code.co_name == "handle_torch_function" or is_user_code(frame.f_code)


def _writes(name: str) -> bool:
    """Whether a function is named as those are that write to their first operand: `add_`, `__itruediv__`, `__setitem__`."""
    is_dunder = name.startswith("__")
    return name.startswith("__i") or name == "__setitem__" or (name.endswith("_") and not is_dunder)


def _as_one_operator(call: _Call) -> Any:
    """The function that writes the same by one operator: `x[isinf(x)] = 0` is `masked_fill_`; None of other such items."""
    if call.name != "__setitem__":
        return call.func
    target, index, value = call.args
    is_mask = type(index) is Tensor and index.dtype == torch.bool and index.shape == target.shape
    return Tensor.masked_fill_ if is_mask and isinstance(value, (int, float)) else None


def _tensors_in(output: Any) -> list[Tensor]:
    values = output if isinstance(output, (tuple, list)) else (output,)
    return [value for value in values if type(value) in PLAIN]


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return value - value == 0.0
    return not isinstance(value, Tensor) or is_finite(value)
