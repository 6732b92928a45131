"""The flight recorder: what is kept of the running step, and when its result is looked at.

A healthy step pays at its edges: entering and leaving a root module, the few operators outside it, the backward call
and the optimizer. Nothing here writes to a tensor of the script. Every entry point is called by a probe, which
catches whatever goes wrong here (see `probes`), so an error never reaches the training.
"""

from __future__ import annotations

import math
import random
import sys
import threading
import time
import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.attributes import AttributeWatch
from ampguard.capture.barrier import FaultBarrier
from ampguard.capture.buffers import BufferWatch
from ampguard.capture.flags import FiniteFlag, is_capturing, is_immediate
from ampguard.capture.frames import user_line
from ampguard.capture.record import (
    PLAIN_TYPES,
    BadResult,
    Event,
    GlueOp,
    Held,
    HeldGenerator,
    Modes,
    Ref,
    RngStates,
    RootCall,
    StepRecord,
    cuda_rng_states,
    held_in,
    map_tensors,
    refs_in,
    tensors_in,
    version_of,
)
from ampguard.capture.steps import StepCounter
from ampguard.capture.tape import GlueTape
from ampguard.numerics import is_finite

MAX_EVENTS = 4096
"""Events kept of one step; beyond it the record is incomplete."""

RECHECK_DRAWS = 16
"""Calls of a module after which it is looked again from which random streams they draw."""

KEPT_ROOTS = 8
"""Calls of root modules kept from before the last backward, or of an evaluation."""

KEPT_BYTES = 1 << 25
"""Memory that the inputs of older root calls may take up while nothing is differentiated."""

SWEEP_EVENTS = 48
"""Events after which those with dead results are dropped, in a loop that does not differentiate."""

FREE_GLUE_OPS = 96
"""Operators between a module and backward that are always taped; more only while they cost next to nothing."""

TAPED_OP_SECONDS = 6e-6
GLUE_TIME_SHARE = 0.01
MAX_COPY = 1 << 22
"""Elements up to which a tensor is copied before an operator outside every module overwrites it."""

SMALL_ARGUMENT = 1 << 14
"""Elements up to which a module's argument is copied."""

PREFIX_OPS = 48
"""Operators before the first module of a step (preprocessing) that are taped."""


@dataclass(slots=True)
class _Draws:
    """From which random streams a module's calls draw."""

    torch: bool = True
    others: bool = True
    calls: int = 0


class Listener(Protocol):
    """Who is told what the recorder saw. `on_bad` may take its time: the training waits for it."""

    def on_bad(self, bad: BadResult) -> None: ...
    def on_step(self, step: int) -> None: ...
    def on_forward(self) -> None: ...


class LiveTracer(Protocol):
    """Sees operators while the step runs: for steps that cannot be replayed."""

    def watch(self, event: Event) -> AbstractContextManager[Any]: ...
    def begin_step(self) -> None: ...


class FlightRecorder:
    """Keeps the events of the current step and judges its results."""

    def __init__(self, listener: Listener, barrier: FaultBarrier) -> None:
        self.listener = listener
        self.barrier = barrier
        self.active = False
        self.paused = False
        """True inside a root call, a backward, a batch fetch or an investigation: nested calls are nobody's business."""
        self.copies_inputs = False
        """True once an input was seen to be changed in place before backward: then larger ones are copied as well."""
        self.counting = False
        """True once every investigation has been made: failures are counted, and nothing is recorded any more."""
        self.record = StepRecord()
        self.tape = GlueTape(self)
        self.steps = StepCounter()
        self.buffers = BufferWatch()
        self.attributes = AttributeWatch()
        self.swapped_state: tuple[nn.Module, Any] | None = None
        self.loss_of_scaled: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        self.suspects: list[BadResult] = []
        self.last_batch: Any = None
        self.live: LiveTracer | None = None
        self.last_good_step: int | None = None
        self.step_seconds = 0.0
        self.thread = threading.get_ident()
        self._next_index = 0
        self._producers: dict[int, tuple[weakref.ref[Tensor], Ref, int]] = {}
        self._writers: dict[int, list[int]] = {}
        self._closed_until = 0
        self._iteration_start = 0
        self._sweep_at = SWEEP_EVENTS
        self._goes_on_after_backward = False
        self._has_root = False
        self._is_functional = False
        self._judged: set[int] = set()
        self._judged_losses: list[weakref.ref[Tensor]] = []
        self._unread: list[tuple[FiniteFlag, BadResult]] = []
        self._unread_outputs: list[tuple[FiniteFlag, BadResult]] = []
        self._updates = 0
        self._stepped: list[tuple[int, weakref.ref[torch.optim.Optimizer]]] = []
        self._step_started = time.perf_counter()
        self._glue_limit = MAX_EVENTS
        self._prefix_enabled = True
        self.between_steps = False
        self._clears_between_steps = False
        self._empty_prefixes = 0
        """Steps so far in which nothing was computed before the first module."""
        self._draws: dict[tuple[int, bool], _Draws] = {}
        self._prefixes: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._innocent: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    # --- root calls -------------------------------------------------------------------------------------------------

    def enter_root(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RootCall | None:
        """Keep what a call of `module` needs to be run again. None where it is not to be recorded."""
        if self.counting:
            self.listener.on_forward()
            return None
        if compat.in_backward() or compat.in_functorch() or is_capturing():
            return None
        if self.thread != threading.get_ident():
            return None
        self.tape.leave()
        if compat.dispatch_depth():
            return None  # the script watches this call with a dispatch mode of its own
        self._has_root = True
        self._settle(module)
        self.listener.on_forward()
        self._forget_finished()
        frame = sys._getframe(2)
        modes = current_modes()
        root = RootCall(
            index=self._claim_index(),
            module=module,
            args=map_tensors(args, self._name_argument),
            kwargs=map_tensors(kwargs, self._name_argument) if kwargs else {},
            modes=modes,
            rng=self._rng_states(module),
            training=module.training,
            buffers=self.buffers.before_call(module),
            line=user_line(frame),
            prefix=self._prefix(module, frame),
            updates_before=self._updates,
            attributes=self.attributes.before_call(module),
        )
        if self.swapped_state is not None and self.swapped_state[0] is module:
            root.swapped_state = map_tensors(dict(self.swapped_state[1]), self._name_argument)
        self._append(root)
        if self.between_steps:
            started = self.record.events[0].index >= self._iteration_start if len(self.record.events) > 1 else False
            self._empty_prefixes = 0 if started else self._empty_prefixes + 1
        self.between_steps = False
        root.started = time.perf_counter()
        return root

    def leave_root(self, root: RootCall, output: Any) -> None:
        """Note what the call returned, and look at it where nothing else will."""
        root.seconds = time.perf_counter() - root.started
        outputs = tensors_in(output)
        root.outputs = [weakref.ref(tensor) for tensor in outputs]
        root.floating = [tensor.is_floating_point() for tensor in outputs]
        for position, tensor in enumerate(outputs):
            self._define(tensor, Ref(root.index, position))
        self._note_random_draws(root)
        root.attributes = self.attributes.after_call(root.module, root.attributes)
        poisoned = self.buffers.after_call(root.module, root.buffers)
        if poisoned:
            self.suspects.append(
                BadResult(
                    "buffer",
                    "train" if root.modes.grad else "eval",
                    self.steps.count,
                    self._slice(),
                    tuple(Held(tensor, version_of(tensor)) for _, tensor in poisoned),
                    names=tuple(name for name, _ in poisoned),
                )
            )
        if not root.modes.grad and root.module not in self._innocent:
            self._look_at_outputs(root, outputs)
        self.tape.enter(self._glue_limit)

    def _look_at_outputs(self, root: RootCall, outputs: list[Tensor]) -> None:
        floats = [(i, t) for i, t in enumerate(outputs) if t.is_floating_point()]
        flag = FiniteFlag([t for _, t in floats])
        refs = tuple(Ref(root.index, i) for i, t in floats if not is_immediate(t) or not is_finite(t))
        bad = BadResult("output", "eval", self.steps.count, self._slice(), refs)
        if not flag.is_known:
            self._unread_outputs.append((flag, bad))
        elif not flag.is_set():
            if root.modes.inference:  # its results cannot be a teacher's in a training step
                self._report(bad)
            else:
                self.suspects.append(bad)

    def _read_outputs(self, wait: bool) -> None:
        """What a GPU has found of the outputs of an evaluation; at most two calls are left unread."""
        while self._unread_outputs:
            flag, bad = self._unread_outputs[0]
            if not (wait or len(self._unread_outputs) > 2 or flag.is_known):
                return
            del self._unread_outputs[0]
            if not flag.is_set():
                self.suspects.append(bad)

    def count_output(self, output: Any) -> None:
        """A module returned, in evaluation, after the last investigation."""
        if any(t.is_floating_point() and not is_finite(t) for t in tensors_in(output)):
            self._report(BadResult("output", "eval", self.steps.count, StepRecord(), ()))

    def root_raised(self, root: RootCall, error: BaseException) -> None:
        """A module raised. PyTorch refuses constants that do not fit a half: that is a diagnosis, others are not."""
        root.error = error
        self._raised(root, error)

    def _raised(self, event: Event, error: BaseException) -> None:
        if is_conversion_refusal(error):
            mode: Literal["train", "eval"] = "train" if torch.is_grad_enabled() else "eval"
            self._report(
                BadResult("raised", mode, self.steps.count, self._slice(), (Ref(event.index, 0),), error=error)
            )

    # --- glue -------------------------------------------------------------------------------------------------------

    def tape_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rng: RngStates | None) -> GlueOp | None:
        """Keep one operator that is about to run outside every module. Called by the tape."""
        overwritten = self.tape.overwritten(func)
        if overwritten:
            args = tuple(self._copied(a) if i in overwritten else a for i, a in enumerate(args))
        events = self.record.events
        if len(events) >= MAX_EVENTS:
            self.record.complete = False
            return None
        name = self._named
        op = GlueOp(
            self._next_index,
            func,
            tuple([name(a) for a in args]),
            {k: name(v) for k, v in kwargs.items()} if kwargs else kwargs,
            user_line(sys._getframe(3)),
            torch.is_grad_enabled(),
            rng,
        )
        self._next_index += 1
        events.append(op)
        if events[0].index < self._closed_until and not self._goes_on_after_backward:
            old = self._closed_until
            self._goes_on_after_backward = any(r.event < old for r in refs_in((op.args, op.kwargs)))
        return op

    def tape_finished(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Keep one operator that has run and that changed none of its operands."""
        if args and output is args[0]:
            return  # `lift_fresh`, `contiguous` of what is contiguous: nothing happened
        op = self.tape_op(func, args, kwargs, None)
        if op is None:
            return
        if self.tape.is_view(func) and args and isinstance(args[0], Tensor):
            self._note_view(op, args[0], output)
        elif type(output) is Tensor:
            self._producers[id(output)] = (ref := weakref.ref(output), Ref(op.index, 0), version_of(output))
            op.outputs.append(ref)
            op.floating.append(output.dtype.is_floating_point)
        else:
            self.taped(op, output)

    def _note_view(self, op: GlueOp, base: Tensor, output: Any) -> None:
        """A view shares its base's version counter, but only once PyTorch has returned it to the script."""
        version = version_of(base)
        for position, view in enumerate(output if isinstance(output, (tuple, list)) else (output,)):
            ref = weakref.ref(view)
            self._producers[id(view)] = (ref, Ref(op.index, position), version)
            op.outputs.append(ref)
            op.floating.append(view.is_floating_point())

    def taped(self, op: GlueOp, output: Any) -> None:
        """Note what the taped operator returned."""
        writes = self.tape.overwritten(op.func)
        for position, tensor in enumerate(output if isinstance(output, (tuple, list)) else (output,)):
            if not isinstance(tensor, Tensor):
                continue
            if writes:
                self._note_write(tensor, op)
            else:
                self._define(tensor, Ref(op.index, position))
            op.outputs.append(weakref.ref(tensor))
            op.floating.append(tensor.is_floating_point())

    def glue_raised(self, op: GlueOp, error: BaseException) -> None:
        op.error = error
        self._raised(op, error)

    def tape_exhausted(self) -> None:
        """The tape met more operators than it may follow."""
        self.record.complete = False
        if not self._is_functional and not any(isinstance(event, RootCall) for event in self.record.events):
            self._prefix_enabled = False

    def read(self, tensor: Tensor, value: Any) -> None:
        """The script read a number from the device, the way a loss is looked at (`loss.item()`)."""
        ref = self.lookup(tensor)
        if ref is None:
            return
        if isinstance(value, bool):
            ref = self._asked_about(ref)
        elif not isinstance(value, float) or value - value == 0.0:
            return
        if ref is None or not self._comes_from_a_root(ref) or any(ref in bad.targets for bad in self.suspects):
            return
        if self._judged and self._judged & self._ancestors(ref):
            return  # a loss that backward was called on: it has been judged
        mode: Literal["train", "eval"] = "train" if self._wants_gradient(ref) else "eval"
        self.suspects.append(BadResult("loss", mode, self.steps.count, self._slice(), (ref,)))

    # --- backward ---------------------------------------------------------------------------------------------------

    def note_scaled(self, loss: Any, scaled: Any) -> None:
        """Remember which loss a scaled loss was made from."""
        if isinstance(loss, Tensor) and isinstance(scaled, Tensor):
            self.loss_of_scaled[id(scaled)] = (weakref.ref(scaled), loss)

    def before_backward(self, tensors: Any) -> None:
        """Judge the loss before it is differentiated: everything that made it is still as it was."""
        self.tape.leave()
        self._follow_thread()
        if self.counting:
            self._count_loss(tensors)
            return
        losses = [self._unscaled(t) for t in ([tensors] if isinstance(tensors, Tensor) else list(tensors))]
        if self._is_healthy(losses):
            return
        targets: list[Ref | Held] = []
        if losses and all(any(known() is loss for known in self._judged_losses) for loss in losses):
            return  # differentiated before, with retain_graph
        self._judged_losses = [weakref.ref(loss) for loss in losses]
        for loss in losses:
            made_by = self.lookup(loss)
            if made_by is not None:
                self._judged.add(made_by.event)
            targets.append(made_by or Held(loss, version_of(loss)))
        self._read_outputs(wait=False)
        self._drop_teachers()
        flag = FiniteFlag(losses)
        bad = BadResult("loss", "train", self.steps.count, self._slice(), tuple(targets))
        if flag.is_known:
            self._judge(flag, bad)
        else:
            self._unread.append((flag, bad))
        self.settle_all()

    def _follow_thread(self) -> None:
        """Training is where backward is called: what another thread did before was something else."""
        thread = threading.get_ident()
        if thread != self.thread:
            self.thread = thread
            self.tape = GlueTape(self)
            self.record = StepRecord()
            self._producers.clear()

    def _is_healthy(self, losses: list[Tensor]) -> bool:
        """The common case, quickly: one finite number on the CPU and nothing else to settle."""
        if len(losses) != 1 or self.suspects or self._unread_outputs:
            return False
        loss = losses[0]
        if loss.numel() != 1 or not is_immediate(loss) or loss.is_complex() or not compat.has_values(loss):
            return False
        if not math.isfinite(loss.item()):
            return False
        made_by = self.lookup(loss)
        if made_by is not None:
            self._judged.add(made_by.event)
        self.last_good_step = self.steps.count
        return True

    def _judge(self, flag: FiniteFlag, bad: BadResult) -> None:
        if flag.is_set():
            self.last_good_step = bad.step
        else:
            self._report(bad)

    def read_flags(self, wait: bool) -> None:
        """Judge the losses of a GPU, before anything that they were made from changes."""
        while self._unread and (wait or self._unread[0][0].is_known):
            flag, bad = self._unread.pop(0)
            self._judge(flag, bad)

    def _count_loss(self, tensors: Any) -> None:
        losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if any(not is_finite(self._unscaled(loss)) for loss in losses):
            self._report(BadResult("loss", "train", self.steps.count, StepRecord(), ()))

    def after_backward(self) -> None:
        """The graph is used up: events before now are kept only while their results are."""
        before, self._closed_until = self._closed_until, self._next_index
        self.loss_of_scaled.clear()
        if self.live is not None:
            self.live.begin_step()
        if self.steps.differentiated():  # parameters updated by hand
            self._end_iteration()
            self._iteration_start = before  # perhaps two backward passes make one step
            self.resume_tape()
        elif self._goes_on_after_backward or self.steps.count < 2:
            self.resume_tape()

    def _unscaled(self, tensor: Tensor) -> Tensor:
        known = self.loss_of_scaled.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else tensor

    # --- optimizer and steps ----------------------------------------------------------------------------------------

    @property
    def attempts(self) -> int:
        """Optimizer steps attempted so far."""
        return self._updates

    def before_update(self, by_scaler: bool) -> None:
        """An optimizer is about to change its parameters (or the scaler to let it, which waits for the device itself)."""
        self.tape.leave()
        if not by_scaler:
            self.read_flags(wait=True)

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's step was attempted (a step that the scaler skipped included)."""
        self.read_flags(wait=True)
        self._updates += 1
        self._stepped.append((self._updates, weakref.ref(optimizer)))
        del self._stepped[:-64]
        if self.steps.attempted(optimizer):
            self._end_iteration()

    def stepped_since(self, update: int) -> list[torch.optim.Optimizer]:
        """The optimizers that stepped after update number `update`."""
        live = (ref() for number, ref in self._stepped if number > update)
        return [optimizer for optimizer in live if optimizer is not None]

    def _end_iteration(self) -> None:
        now = time.perf_counter()
        seconds = now - self._step_started
        self._step_started = now
        self.step_seconds = seconds if not self.step_seconds else min(0.8 * self.step_seconds + 0.2 * seconds, 1e4)
        allowed = int(GLUE_TIME_SHARE * self.step_seconds / TAPED_OP_SECONDS)
        if self.steps.count > 2:
            self._glue_limit = min(MAX_EVENTS, max(FREE_GLUE_OPS, allowed))
        self.between_steps = True
        self._iteration_start = self._next_index
        self._is_functional = not self._has_root
        self._has_root = False
        self.listener.on_step(self.steps.count)

    def bookkeeping_done(self, is_last: bool) -> None:
        """The scaler was updated, an optimizer stepped or its gradients were cleared, between two steps.

        What the script computes from here to the first module is preprocessing and is taped; where a loop clears its
        gradients in between, from there on (`is_last`).
        """
        if not self._is_functional:
            self._clears_between_steps = self._clears_between_steps or is_last
        if is_last or not self._clears_between_steps:
            self.tape_preprocessing()

    def tape_preprocessing(self) -> None:
        """Tape what the script computes before the first module of a step."""
        if self.thread == threading.get_ident() and not self.paused:
            if self._is_functional:  # no module was called in the last step: everything is outside modules
                self.tape.enter(self._glue_limit)
            elif self._prefix_enabled and self._empty_prefixes < 4:
                self.tape.enter(PREFIX_OPS)

    def note_batch(self, batch: Any) -> None:
        """A batch left the DataLoader; what the script computes from it before the first module is taped."""
        self.last_batch = map_tensors(batch, weakref.ref)
        self.tape_preprocessing()

    def resume_tape(self) -> None:
        """Go on taping after `torch.autograd.grad` in the middle of a loss."""
        if self.thread == threading.get_ident() and not self.paused:
            self.tape.enter(self._glue_limit)

    def pause_clock(self, seconds: float) -> None:
        """Time that ampguard itself took does not count as the script's step."""
        self._step_started += seconds

    # --- suspects ---------------------------------------------------------------------------------------------------

    def _settle(self, module: nn.Module) -> None:
        """A new root call begins: what was bad before it and was never differentiated stays bad."""
        self._read_outputs(wait=False)
        self._suspect_discarded_losses(module)
        if not self.suspects:
            return
        if any(bad.kind == "output" for bad in self.suspects) and torch.is_grad_enabled():
            return  # perhaps a teacher's call in the middle of a training step: backward will tell
        first = self.suspects[0]
        root = self._root_of(first)
        if first.kind == "loss" or root is None or root.module is module:
            self.settle_all()

    def settle_all(self) -> None:
        """Report every suspect."""
        suspects, self.suspects = self.suspects, []
        for bad in suspects:
            self._report(bad)

    def flush(self, error: BaseException | None = None) -> None:
        """The script ends, perhaps with an error: judge what is left."""
        self.tape.leave()
        if isinstance(error, Exception):
            self._suspect_locals(error)
        self.read_flags(wait=True)
        self._read_outputs(wait=True)
        self._suspect_discarded_losses(None)
        self.settle_all()

    def _suspect_locals(self, error: Exception) -> None:
        """The script raised: of the tensors in its frames, the first that was computed and is not finite."""
        found: list[Ref] = []
        entry = error.__traceback__
        while entry is not None:
            for value in entry.tb_frame.f_locals.values():
                if isinstance(value, Tensor) and value.is_floating_point() and is_immediate(value):
                    ref = self.lookup(value)
                    if ref is not None and not is_finite(value):
                        found.append(ref)
            entry = entry.tb_next
        for event in self.record.events if not found else ():
            live = [(i, r()) for i, r in enumerate(event.outputs) if isinstance(event, RootCall)]
            found += [Ref(event.index, i) for i, t in live if t is not None and is_immediate(t) and not is_finite(t)]
        found = [ref for ref in found if ref.event >= self._iteration_start and ref.event not in self._judged]
        if found and not self.suspects:
            first = min(found, key=lambda ref: (ref.event, ref.output))
            mode: Literal["train", "eval"] = "train" if self._wants_gradient(first) else "eval"
            self.suspects.append(BadResult("loss", mode, self.steps.count, self._slice(), (first,)))

    def _suspect_discarded_losses(self, module: nn.Module | None) -> None:
        """A scalar that wants a gradient, never differentiated and bad: a loop that skips or stops on a bad loss."""
        open_events = [e for e in self.record.events if e.index >= self._closed_until]
        roots = [e for e in open_events if isinstance(e, RootCall)]
        if not roots or any(bad.kind == "loss" for bad in self.suspects):
            return
        if module is not None and all(e.module is not module for e in roots):
            return
        for event in reversed(open_events):
            for position, ref in enumerate(event.outputs):
                tensor = ref()
                if tensor is None or tensor.numel() != 1 or not tensor.is_floating_point() or tensor.is_meta:
                    continue
                if tensor.requires_grad and (tensor.device.type == "cpu" or module is None) and not is_finite(tensor):
                    self.suspects.append(
                        BadResult("loss", "train", self.steps.count, self._slice(), (Ref(event.index, position),))
                    )
                    return
        last = roots[-1]
        if module is None or module is last.module:
            self._suspect_grad_enabled_evaluation(last)

    def _suspect_grad_enabled_evaluation(self, root: RootCall) -> None:
        """`model.eval()` without `no_grad`, and nothing was differentiated."""
        if root.training or not root.modes.grad:
            return
        bad = [
            i
            for i, ref in enumerate(root.outputs)
            if (t := ref()) is not None and t.is_floating_point() and not is_finite(t)
        ]
        if bad:
            refs = tuple(Ref(root.index, i) for i in bad)
            self.suspects.append(BadResult("output", "eval", self.steps.count, self._slice(), refs))

    def _drop_teachers(self) -> None:
        """A call under `no_grad` whose result reached this backward was no evaluation: the loss is the judge."""
        if not self.suspects:
            return
        reached = self._events_behind_gradients()
        self.suspects = [
            bad
            for bad in self.suspects
            if bad.kind == "buffer"
            or (bad.kind == "output" and not any(isinstance(t, Ref) and t.event in reached for t in bad.targets))
        ]

    def _events_behind_gradients(self) -> set[int]:
        """Events from which a result that wants a gradient was made."""
        reached: set[int] = set()
        for event in reversed(self.record.events):
            wants = event.index in reached or (event.modes.grad if isinstance(event, RootCall) else event.grad)
            if wants:
                reached |= {ref.event for ref in refs_in((event.args, event.kwargs))}
        return reached

    def mark_innocent(self, module: nn.Module) -> None:
        """This module's evaluation outputs hold infinities on purpose: do not ask again."""
        self._innocent.add(module)

    def _report(self, bad: BadResult) -> None:
        paused, self.paused = self.paused, True
        self.tape.leave()
        started = time.perf_counter()
        try:
            self.listener.on_bad(bad)
        finally:
            self.paused = paused
            self.pause_clock(time.perf_counter() - started)

    # --- the record -------------------------------------------------------------------------------------------------

    def lookup(self, tensor: Tensor) -> Ref | None:
        """The event that gave this very tensor object its present value, if one did.

        A tensor that was written to since, through a view or by an operator that was not recorded, has none.
        """
        known = self._producers.get(id(tensor))
        if known is None or known[0]() is not tensor or version_of(tensor) != known[2]:
            return None
        ref = known[1]
        if ref.event < self._closed_until:
            event = self.record.event(ref.event)
            if event is None or (ref.event < self._iteration_start and not isinstance(event, RootCall)):
                return None  # glue of a finished step is not kept
        return ref

    def _define(self, tensor: Tensor, ref: Ref) -> None:
        self._producers[id(tensor)] = (weakref.ref(tensor), ref, version_of(tensor))

    def _note_write(self, written: Tensor, op: GlueOp) -> None:
        """An operator wrote to a tensor: what shares its memory and was made by recorded events has a new value.

        PyTorch counts the new version after the operator returns, hence the + 1. A tensor that no event made is copied
        for the replay, so what shares its memory is not followed but taken as it is when it is used.
        """
        version, index = version_of(written), op.index
        memory = compat.storage_key(written) if any(isinstance(a, Ref) for a in op.args[:1]) else 0
        for identity, (alias, ref, known_version) in list(self._producers.items()):
            tensor = alias()
            if tensor is None or tensor is written or known_version != version_of(tensor):
                continue
            if memory and compat.storage_key(tensor) == memory:
                self._producers[identity] = (alias, ref, known_version + 1)
                self._writers.setdefault(ref.event, []).append(index)
        self._producers[id(written)] = (weakref.ref(written), Ref(index, 0), version + 1)

    def _name_argument(self, tensor: Tensor) -> Ref | Held:
        """An argument of a module. Small ones are copied: masks and states are changed in place before backward."""
        known = self.lookup(tensor)
        if known is not None:
            return known
        limit = MAX_COPY if self.copies_inputs else SMALL_ARGUMENT
        if tensor.numel() <= limit and not tensor.requires_grad and tensor.layout == torch.strided:
            return Held(tensor, version_of(tensor), tensor.clone())
        return Held(tensor, version_of(tensor))

    def _named(self, value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN_TYPES:
            return value
        if kind is Tensor or isinstance(value, Tensor):
            return self.lookup(value) or Held(value, version_of(value))
        if kind is list or kind is tuple:
            return [self._named(item) for item in value]
        if kind is torch.Generator:
            return HeldGenerator(value.device, value.get_state())
        return value

    def _copied(self, value: Any) -> Any:
        """An operand that the operator overwrites and that no event made: keep its value."""
        if not isinstance(value, Tensor) or self.lookup(value) is not None or value.numel() > MAX_COPY:
            return value
        version, copy = version_of(value), value.detach().clone()
        for event in self.record.events:  # earlier readers saw this value too
            for held in held_in((event.args, event.kwargs)):
                if held.tensor is value and held.version == version and held.copy is None:
                    held.copy = copy
        return Held(value, version, copy)

    def _claim_index(self) -> int:
        index = self._next_index
        self._next_index += 1
        return index

    def _append(self, event: Event) -> None:
        self.record.events.append(event)

    def _slice(self) -> StepRecord:
        return StepRecord(list(self.record.events), self.record.complete, dict(self._writers))

    def _forget_finished(self) -> None:
        """Drop the events before the last backward, and dead ones of a loop that never differentiates.

        Kept are events whose results are still in use (a GAN's fake image, an output of which a second loss is made).
        """
        events = self.record.events
        if events and events[0].index < self._closed_until:
            closed = [e for e in events if e.index < self._closed_until]
            self._keep(self._still_used(closed) | {e.index for e in events[len(closed) :]})
            self.record.complete = True
            self._judged.clear()
        elif not self.suspects and (len(events) > self._sweep_at or self._is_evaluating(events)):
            self._keep(self._still_used(events))
            self._sweep_at = max(SWEEP_EVENTS, 2 * len(self.record.events))

    def _is_evaluating(self, events: list[Event]) -> bool:
        roots = [e for e in events if isinstance(e, RootCall)]
        return len(roots) > 1 and not any(root.modes.grad for root in roots)

    def _keep(self, kept: set[int]) -> None:
        self.record.events = [e for e in self.record.events if e.index in kept]
        self._writers = {k: v for k, v in self._writers.items() if k in kept}
        if len(self._producers) > 2 * len(kept) + 32:
            self._producers = {k: v for k, v in self._producers.items() if v[1].event in kept}

    def _still_used(self, events: list[Event]) -> set[int]:
        """Events with a live result (of root calls before the last backward: the last few), and what they came from."""
        alive = [e for e in events if has_live_result(e)]
        roots = [e.index for e in alive if isinstance(e, RootCall)]
        kept = {e.index for e in alive if isinstance(e, GlueOp) and e.index >= self._iteration_start}
        kept |= set(roots[-KEPT_ROOTS:]) | {i for i in roots if i >= self._iteration_start}
        beyond = self._beyond_memory(alive, kept)
        kept -= beyond
        present = {e.index for e in events} - beyond
        for event in reversed(events) if kept else ():
            if event.index in kept:
                kept |= {ref.event for ref in refs_in((event.args, event.kwargs))} & present
        return kept

    def _asked_about(self, ref: Ref) -> Ref | None:
        """The non-finite number behind a yes or no (`torch.isnan(loss)`), if it is still there."""
        stack, seen = [ref], set[int]()
        while stack and len(seen) < 16:
            current = stack.pop()
            event = self.record.event(current.event)
            if event is None or current.event in seen:
                continue
            seen.add(current.event)
            tensor = event.outputs[current.output]() if current.output < len(event.outputs) else None
            if tensor is not None and tensor.is_floating_point():
                if tensor.numel() == 1 and not is_finite(tensor):
                    return current
                continue
            if isinstance(event, GlueOp):
                stack += refs_in((event.args, event.kwargs))
        return None

    def _beyond_memory(self, alive: list[Event], kept: set[int]) -> set[int]:
        """Older root calls whose inputs would take up too much; without gradient, all but the last few."""
        roots = [e for e in alive if isinstance(e, RootCall) and e.index in kept]
        beyond: set[int] = set()
        size = 0
        for root in reversed(roots[:-KEPT_ROOTS]):
            size += sum(h.tensor.numel() * h.tensor.element_size() for h in held_in((root.args, root.kwargs)))
            if size > KEPT_BYTES or not root.modes.grad:
                beyond.add(root.index)
        for event in alive if beyond else ():  # what was made from them cannot be replayed either
            if event.index in kept and any(ref.event in beyond for ref in refs_in((event.args, event.kwargs))):
                beyond.add(event.index)
        return beyond

    def _ancestors(self, ref: Ref) -> set[int]:
        """The event that made a tensor, and those that its only changes in form came from."""
        found = {ref.event}
        event = self.record.event(ref.event)
        while isinstance(event, GlueOp) and (refs := refs_in(event.args)) and len(refs) == 1:
            found.add(refs[0].event)
            event = self.record.event(refs[0].event)
        return found

    def _comes_from_a_root(self, ref: Ref) -> bool:
        """Whether floating-point values lead from a root call to this tensor (a count or an accuracy has none)."""
        seen: set[int] = set()
        stack = [ref.event]
        while stack:
            index = stack.pop()
            if index in seen:
                continue
            seen.add(index)
            event = self.record.event(index)
            if isinstance(event, RootCall):
                return True
            if isinstance(event, GlueOp):
                stack.extend(r.event for r in refs_in((event.args, event.kwargs)) if self._is_float(r))
        return False

    def _is_float(self, ref: Ref) -> bool:
        event = self.record.event(ref.event)
        return event is not None and ref.output < len(event.floating) and event.floating[ref.output]

    def _wants_gradient(self, ref: Ref) -> bool:
        event = self.record.event(ref.event)
        if isinstance(event, RootCall):
            return event.modes.grad
        if isinstance(event, GlueOp):
            return event.grad and any(self._wants_gradient(r) for r in refs_in((event.args, event.kwargs)))
        return False

    def _root_of(self, bad: BadResult) -> RootCall | None:
        for target in bad.targets:
            if isinstance(target, Ref):
                event = bad.record.event(target.event)
                if isinstance(event, RootCall):
                    return event
        return None

    # --- surroundings -----------------------------------------------------------------------------------------------

    def _rng_states(self, module: nn.Module) -> RngStates:
        """Where the random streams stand; without those that calls of this module have been seen not to draw from."""
        draws = self._draws.setdefault((id(module), module.training), _Draws())
        draws.calls += 1
        if draws.calls % RECHECK_DRAWS == 1:
            draws.torch = draws.others = True
        numpy = sys.modules.get("numpy") if draws.others else None
        return RngStates(
            torch.default_generator.get_state() if draws.torch else None,
            cuda_rng_states(),
            random.getstate() if draws.others else None,
            numpy.random.get_state(legacy=True) if numpy is not None and hasattr(numpy, "random") else None,
        )

    def _note_random_draws(self, root: RootCall) -> None:
        """Saving a stream costs: stop where the module does not draw from it."""
        draws = self._draws.get((id(root.module), root.training))
        if draws is None:
            return
        if root.rng.python is not None:
            numpy = sys.modules.get("numpy")
            draws.others = random.getstate() != root.rng.python or (
                numpy is not None and root.rng.numpy is not None and not _same_numpy(numpy, root.rng.numpy)
            )
        if draws.calls % RECHECK_DRAWS == 1 and root.rng.torch_cpu is not None:
            draws.torch = not torch.equal(root.rng.torch_cpu, torch.default_generator.get_state())

    def _prefix(self, module: nn.Module, frame: Any) -> str:
        """Where `module` hangs in the module whose method called it (`self.encoder(x)` in a LightningModule)."""
        known = self._prefixes.get(module)
        if known is None:
            known = self._prefixes[module] = find_prefix(module, frame)
        return known


def has_live_result(event: Event) -> bool:
    """Whether the script still holds something that the event returned (what the event itself holds does not count)."""
    live = [tensor for ref in event.outputs if (tensor := ref()) is not None]
    if not live:
        return False
    own = {id(held.tensor) for held in held_in((event.args, event.kwargs))}
    return any(id(tensor) not in own for tensor in live)


def is_conversion_refusal(error: BaseException) -> bool:
    """PyTorch's refusal to put a constant into a type that cannot hold it (`masked_fill(half, -1e9)`)."""
    return isinstance(error, RuntimeError) and "without overflow" in str(error)


def current_modes() -> Modes:
    """The calling thread's modes."""
    devices = ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)
    return Modes(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices),
    )


def _same_numpy(numpy: Any, state: Any) -> bool:
    now = numpy.random.get_state(legacy=True)
    return now[2] == state[2] and bool((now[1] == state[1]).all())


def find_prefix(module: nn.Module, frame: Any) -> str:
    """The dotted path of `module` from the nearest calling method's own module, "" where there is none."""
    depth = 0
    while frame is not None and depth < 12:
        owner = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames[:1] else None
        if isinstance(owner, nn.Module) and owner is not module:
            for name, child in owner.named_modules():
                if child is module and name:
                    return str(name)
        frame = frame.f_back
        depth += 1
    return ""
