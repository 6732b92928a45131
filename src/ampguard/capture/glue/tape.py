"""The glue tape: the few operators that run outside every module, between a forward pass and `backward()`.

It is a dispatch mode (in short steps a function mode, see `calltape`), entered when a root module returns and left
before anything else of weight begins: another root module, backward, an optimizer, a batch fetch. Modes are a stack: if
the script has put one of its own on top of ours, ours stays where it is and only passes on what it sees until it is on
top again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.barrier import FaultBarrier
from ampguard.capture.events.autocasting import cast_types_within
from ampguard.capture.events.log import EventLog
from ampguard.capture.glue.before_training import BeforeTraining
from ampguard.capture.glue.calltape import CallTape
from ampguard.capture.glue.originals import Replacements
from ampguard.capture.judging.judge import Judge
from ampguard.capture.record import GlueOp, torch_rng_states
from ampguard.capture.root_calls.trees import tensors_in

FIRST_ONLY = frozenset({0})
LOOK_AGAIN = 64
"""Times that the tape is put on between two looks at what the script has replaced; a power of 2."""


class Taped(Protocol):
    """Whose operators are taped: the recorder, as far as the tape knows it."""

    active: bool
    paused: bool
    counting: bool
    barrier: FaultBarrier
    log: EventLog
    judge: Judge
    has_compiled_before: bool
    between_steps: bool
    before_training: BeforeTraining

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


READS = frozenset(
    [torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default, torch.ops.aten.is_nonzero.default]
)
"""By which a script gets a number out of a tensor. In inference mode PyTorch hands on `item()` itself, not what it calls."""


GIVES_MEMORY = torch.ops.aten.set_
"""Puts a storage under a tensor (`copy.deepcopy`, unpickling): its values are given. Run again, it would read those of now."""


class GlueTape(compat.DispatchMode):
    """Records operators into the event log while it is on the stack."""

    def __init__(self, taped: Taped, thread: int) -> None:
        super().__init__()
        self._taped = taped
        self._thread = thread
        self.left = 0
        """How many more may be taped."""
        self.calls = CallTape(self)
        self.keeps_calls = False
        """Whether the glue of steps like these is kept call by call."""
        self.is_on_stack = False
        """Whether calls or operators come by, recorded or not."""
        self.is_barred = False
        """True inside a compiled training step: Dynamo's state of dispatch and a mode that comes or goes there do not agree."""
        self.is_of_calls = False
        """Whether calls come by, not operators."""
        self._depth = 0
        """How many modes of functions were on when the tape was put on last, in steps whose calls are kept."""
        self._stays_off = False
        """Whether the script runs a compiled function whose calls are not seen, and which calls us."""
        self._has_met_modes = False
        """Whether the script puts dispatch modes of its own on: only one of ours below them sees all that they let through."""
        self._has_replaced = False
        """Whether functions of PyTorch were replaced by others, which a function mode would be handed in their stead."""
        self._has_duals = False
        """Whether the script differentiates in forward mode."""
        self._replacements = Replacements()
        self._entries = 0
        self._inference = False
        self._facts: dict[Any, _Facts] = {}
        self.reads = 0
        """Numbers that the script has read from tensors while the tape was on."""

    def enter(self, limit: int) -> None:
        """Start taping, at most `limit` operators."""
        if self._taped.before_training.is_on and limit > 0:
            self._taped.before_training.end()
        if self.is_on_stack:
            self.left = limit
        elif (
            limit > 0
            and self._taped.active  # a wrapper may come back from what it called after the guard has ended
            and not self.is_barred
            and not (self._taped.has_compiled_before and self._is_kept_off(sys._getframe(1)))
            and not self._taped.counting
            and not self._taped.barrier.is_hiding
            and compat.dispatch_modes_on() == 0
            and not compat.in_functorch()
            and self._thread == threading.get_ident()
        ):
            self.left = limit
            self.is_on_stack = True
            depth = self._depth = compat.function_modes_on() if self.keeps_calls else 0
            self.is_of_calls = (
                self.keeps_calls
                and torch.is_grad_enabled()  # in evaluation a kept call would hold on to its operands for as long as it is kept
                and (not depth or compat.may_lie_below(depth))
                and self._may_keep_calls()
            )
            if self.is_of_calls:
                self.calls.is_alone = not depth
                self._taped.barrier.calls = self.calls
                compat.push_function_mode(self.calls)
            else:
                self._inference = torch.is_inference_mode_enabled()
                self._taped.barrier.own_modes = 1
                self.begin()

    def enter_behind_backward(self, limit: int) -> None:
        """The same as a backward pass returns. A mode of the script's that is on is off the stack there, as long as PyTorch runs
        what it was asked about: what was put on then would lie beneath it."""
        if not self.keeps_calls or compat.function_modes_on() == self._depth:
            self.enter(limit)

    def _may_keep_calls(self) -> bool:
        self._entries += 1
        if self._entries & (LOOK_AGAIN - 1) == 1:
            self._has_replaced = self._replacements.are_there() or compat.may_compile()
        is_clear = not (self._has_met_modes or self._has_replaced or self._has_duals or self.calls.met.is_misled)
        return is_clear and self._taped.live is None and compat.FunctionMode.is_available

    def leave(self) -> None:
        """Stop taping; take the mode off the stack if nothing of the script's is on top of it."""
        if not self.is_on_stack or threading.get_ident() != self._thread:
            return
        self.left = 0
        if self.is_of_calls:
            if self.calls.take_off():
                self.is_on_stack = self.is_of_calls = False
                self._taped.barrier.calls = None
            return
        if torch.is_inference_mode_enabled() != self._inference:
            return  # the end of an inference-mode region puts back the dispatch state of its beginning, ours with it
        if self._is_kept_off(sys._getframe(1), until_it_returns=True):
            return
        if compat.is_top_dispatch_mode(self):
            self.end()
            self.is_on_stack = False
            self._taped.barrier.own_modes = 0

    def _is_kept_off(self, frame: FrameType, until_it_returns: bool = False) -> bool:
        """Whether an unseen compiled function keeps the tape off, from now on; or on, where it was, until it returns."""
        if not self._taped.has_compiled_before or (self._stays_off and not until_it_returns):
            return self._stays_off
        is_inside = compat.is_inside_compiled_function(frame)
        self._stays_off = self._stays_off or is_inside
        return is_inside

    def pass_over(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call what asks every parameter for its gradient, without being asked each time."""
        if not self.calls.step_aside(compat.function_modes_on()):
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            self.calls.come_back()

    def scale(self, original: Callable[..., Any], scaler: Any, loss: Any) -> Any:
        """`GradScaler.scale`, which is one multiplication by the scale, without a look at every call that it makes."""
        is_top = self.is_of_calls and self.calls.is_alone and compat.function_modes_on() == 1
        if not is_top or type(loss) is not Tensor or self.is_passing:
            return original(scaler, loss)
        compat.pop_function_mode()
        try:
            scaled = original(scaler, loss)
            if scaled is not loss:
                scale = compat.loss_scale(scaler)
                versions = [compat.plain_version(loss), compat.plain_version(scale) if scale is not None else -1]
                self.calls.keep(torch.mul, (loss, scale), {}, scaled, versions, sys._getframe(2))
        finally:
            compat.push_function_mode(self.calls)
        return scaled

    def renamed(self, before: Tensor, after: Tensor) -> None:
        """A result goes on under another class of tensors: fastai's, MONAI's, `tv_tensors`."""
        if not self.is_passing:
            ref = self.log.lookup(before)
            if ref is not None:
                self.log.producers.rename(after, ref)

    def met_tangent(self, tangent: Tensor, is_made: bool) -> None:
        """A tensor is the tangent of a dual number from now on, or no longer."""
        if not self.is_passing:
            self.log.tangents.note(self.log.next_index, self.log.lookup(tangent), tangent, is_made)

    def begins_dual_level(self) -> None:
        """Dual numbers are in use from now on: a call that is kept as one would not show what it does with their tangents."""
        self._has_duals = True
        if self.is_of_calls and self.is_on_stack and not compat.in_functorch():
            left = self.left
            self.leave()
            self.enter(left)

    # --- one call at a time -------------------------------------------------------------------------------------------

    @property
    def is_passing(self) -> bool:
        """Whether nothing is recorded just now."""
        return self.left <= 0 or self._taped.paused or not self._taped.active

    @property
    def barrier(self) -> FaultBarrier:
        return self._taped.barrier

    @property
    def log(self) -> EventLog:
        return self._taped.log

    @property
    def may_keep_writes(self) -> bool:
        """Whether nothing that waits to be told may have come from what is written to."""
        return not self._taped.judge.suspects

    @property
    def is_between_steps(self) -> bool:
        return self._taped.between_steps

    def has_read(self, tensor: Tensor, value: Any) -> None:
        """The script has read something from a tensor that is no finite number."""
        self._taped.judge.read(tensor, value)

    def tape_one(self) -> bool:
        """Tape the operators of what is called next, though calls are being kept; False where that cannot be."""
        if compat.dispatch_modes_on():
            self._has_met_modes = True
            self._taped.log.is_incomplete()
            return False
        self._taped.barrier.own_modes = 1
        self.begin()
        return True

    def untape_one(self) -> None:
        """That call is over."""
        if compat.is_top_dispatch_mode(self):
            self.end()
        self._taped.barrier.own_modes = 0

    def exhausted(self) -> None:
        """As many were taped as may be."""
        self._taped.tape_exhausted()

    @property
    def is_taping(self) -> bool:
        """Whether operators are being recorded."""
        return self.is_on_stack and self.left > 0

    def abandon(self) -> None:
        """In a forked child, or after a fault of ours: pass operators through until the process ends."""
        self.left = 0
        if self.is_of_calls and self.is_on_stack and threading.get_ident() == self._thread:
            self.calls.take_off()

    def overwritten(self, func: Any) -> frozenset[int]:
        """Positions of the arguments that `func` writes to."""
        return (self._facts.get(func) or self._learn(func)).writes

    def shares_memory(self, func: Any) -> bool:
        """Whether what `func` returns lies in the memory of its first argument: a view of it, or what it has written to."""
        facts = self._facts.get(func) or self._learn(func)
        return facts.is_view or 0 in facts.writes

    def _learn(self, func: Any) -> _Facts:
        writes = compat.positions_written(func)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        is_read = func in READS
        is_bookkeeping = func.namespace == "profiler" or func.overloadpacket is GIVES_MEMORY
        is_bookkeeping = is_bookkeeping or func is compat.COMPARES_WHOLE
        is_plain = not (writes or is_random or is_read or is_bookkeeping or compat.casts_within(func))
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in compat.schema_of(func).returns)
        facts = self._facts[func] = _Facts(writes, is_view, is_random, is_read, is_bookkeeping, is_plain)
        return facts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        taped = self._taped
        kwargs = kwargs or {}
        if self.left <= 0 or taped.paused or not taped.active:
            return compat.run_counted(func, args, kwargs)
        facts = self._facts.get(func)
        if facts is None:
            facts = taped.barrier.call(self._learn, func)
        if facts is None or facts.is_bookkeeping:
            return compat.run_counted(func, args, kwargs)
        if facts.is_read:
            self.reads += 1
            value = func(*args, **kwargs)
            if not (type(value) is float and value - value == 0.0):
                taped.barrier.call(taped.judge.read, args[0], value)
            return value
        self.left -= 1
        if self.left == 0:
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
                    output = compat.run_counted(func, args, kwargs)
            else:
                output = compat.run_counted(func, args, kwargs)
        except BaseException as error:
            if op is not None:
                taped.barrier.call(taped.glue_raised, op, error)
            raise
        if op is not None:
            taped.barrier.call(taped.log.add_results, op, output, bool(facts.writes))
        return output

    def keep_copy(self, target: Tensor, values: Tensor, frame: Any) -> GlueOp | None:
        """`target` is about to be given these values by what is no operator."""
        func = torch.ops.aten.copy_.default
        return self._keep_before(func, (target, values), {}, self._facts.get(func) or self._learn(func), frame)

    def _writes_unread(self, args: Any, facts: _Facts) -> bool:
        """Whether nothing but a tensor is written to that no call that is pending has been given."""
        written = args[0] if args and facts.writes == FIRST_ONLY else None
        return type(written) is Tensor and self._taped.log.is_unread(written, self._gives_memory)

    def _gives_memory(self, func: Any) -> bool:
        """Whether what an operator returns lies in new memory."""
        facts = self._facts.get(func) or self._learn(func)
        return not (facts.is_view or facts.writes or func is torch.ops.aten._unsafe_view.default)

    def _keep_before(self, func: Any, args: Any, kwargs: Any, facts: _Facts, frame: Any) -> GlueOp | None:
        log = self._taped.log
        rng = torch_rng_states() if facts.is_random else None
        if facts.writes and not self._writes_unread(args, facts):
            log.settle()  # the operands of earlier calls are still what they were
            if self._taped.judge.suspects:
                self._taped.judge.settle_before_write(tensors_in([a for i, a in enumerate(args) if i in facts.writes]))
            args = tuple(log.copied(a) if i in facts.writes else a for i, a in enumerate(args))
        op = log.add_operator(func, args, kwargs, rng, frame)
        if op is not None:
            op.casts_for = cast_types_within(func)
        if op is not None and 0 in facts.writes and self._taped.between_steps:
            log.written.note(op, lambda: log.record)
        return op
