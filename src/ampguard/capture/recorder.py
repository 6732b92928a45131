"""The flight recorder: what happens at the edges of a step, in order.

A healthy step pays at its edges only: entering and leaving a root module, the few operators outside it, the backward
call and the optimizer. The recorder keeps the step in its log, taps the glue with its tape and asks its judge about
results. Every entry point is called by a probe, through the fault barrier (see `probes`), so an error never reaches
the training.
"""

from __future__ import annotations

import operator
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.backward_calls import BackwardCalls
from ampguard.capture.barrier import FaultBarrier
from ampguard.capture.events.log import EventLog
from ampguard.capture.frames import MAX_FRAMES, forget_lines, frames_up, locals_of, user_line
from ampguard.capture.glue.before_training import BeforeTraining
from ampguard.capture.glue.functions import AppliedFunctions
from ampguard.capture.glue.preprocessing import uses_computed
from ampguard.capture.glue.schedule import TapeSchedule
from ampguard.capture.glue.tape import GlueTape
from ampguard.capture.glue.taped_preprocessing import TapedPreprocessing
from ampguard.capture.gradients import GradientWatch
from ampguard.capture.graph_captures import GraphCaptures
from ampguard.capture.judging.carried import CarriedState
from ampguard.capture.judging.judge import Judge
from ampguard.capture.listeners import Listener, LiveTracer
from ampguard.capture.loaded import LoadedWeights
from ampguard.capture.ranks.collectives import Collectives
from ampguard.capture.record import BackwardCall, BadResult, GlueOp, Line, Ref, RootCall
from ampguard.capture.remade import gradients_of
from ampguard.capture.root_calls.drivers import Drivers
from ampguard.capture.root_calls.given_objects import with_objects
from ampguard.capture.root_calls.pace import Pace
from ampguard.capture.root_calls.surroundings import current_modes
from ampguard.capture.root_calls.trees import map_tensors, tensors_in
from ampguard.capture.root_calls.usual import CallContext
from ampguard.capture.scaling import LossScaling
from ampguard.capture.steps import StepCounter
from ampguard.capture.turns import TapesLeftBehind, Turns
from ampguard.capture.updated import UpdatedWeights
from ampguard.compat import HAS_CUDA, dispatch_modes_on, graph_task, in_functorch
from ampguard.compat import cuda_is_capturing as is_capturing

LATELY = 8
"""Events in which it is seen whether the script is computing with what is trained."""

FIRST_STEPS = 2
"""Steps in which it is seen what follows a backward pass."""

MOST_PASSES = 4
"""Backward passes a step, up to which all of it is recorded behind a failure."""

FEW_STEPS = 31
"""Of the steps' number in binary, the digits that are 0 where it is seen what the script makes of weights between two."""


class FlightRecorder:
    """Keeps the running step and has its results judged."""

    def __init__(self, listener: Listener, barrier: FaultBarrier) -> None:
        self.listener = listener
        self.on_weights_change: Callable[[], object] | None = None
        """Told before each optimizer's step, where anything waits for the weights as they are. (No hook of its own: one that
        is put on or taken off while PyTorch goes through such hooks ends the script's step.)"""
        self.on_first_update: Callable[[], object] | None = None
        """Called once, as the first update is about to be made."""
        self.barrier = barrier
        self.active = False
        self.paused = False
        """True inside a root call, a backward, a batch fetch or an investigation: nested calls are nobody's business."""
        self.turns = Turns(self._begin_anew)
        self.counting = False
        """True once every investigation has been made: failures are counted, and nothing is recorded any more."""
        self.log = EventLog()
        self.steps = StepCounter()
        self._steps_told = 0
        self._passes_since: int | None = None
        """Where no optimizer is known: the first event before the first backward pass of the running iteration."""
        self.judge = Judge(self.log, self.steps, self._report)
        self.judge.gradients.thread = lambda: self.turns.thread
        self.gradients = GradientWatch(self.log, self.judge)
        self.backward_calls = BackwardCalls(self.log, self.steps)
        forget_lines()
        self.carried = CarriedState(self.log, self.steps, self._report)
        self.tape = GlueTape(self, self.turns.thread)
        self.before_training = BeforeTraining(barrier)
        self.left_behind = TapesLeftBehind(barrier)
        self.schedule = TapeSchedule()
        self.preprocessing = TapedPreprocessing(self)
        self.context = CallContext()
        self.pace = Pace()
        self.drivers = Drivers()
        self.on_raise: Callable[[BaseException], None] = lambda error: None
        """Told of an error in the frame in which a module raised it."""
        self.on_written: Callable[..., None] = lambda weights, record: None
        """Told of weights that the script has written between two steps."""
        self.swapped_state: tuple[nn.Module, Any] | None = None
        self.scaling = LossScaling()
        self.live: LiveTracer | None = None
        self.passed_over = -1
        """The last step in which anything was not recorded that might have been: a call without gradients, the rest of a loss."""
        self._attends_until = (0, 0)
        """Up to which step, and which backward pass, everything is recorded."""
        self.tapes_training = False
        """Whether what is taped may be a part of a loss."""
        self.step_seconds = 0.0
        self.between_steps = False
        self.is_amid_training = False
        """Whether a module was called with gradients since the last step: what is computed now may become part of a loss."""
        self.tells_forward = True
        """Whether the listener wants to know of the next root call."""
        self.ends_run = False
        """Whether the listener ends the run as the next iteration begins: what is differentiated then may call no module."""
        self.regions = 0
        """How often autocast's weight cache was cleared: at the end of each outermost region."""
        self.uses_autocast = False
        """Whether any of these regions was switched on (`enabled=args.amp`)."""
        self._has_root = False
        self._first_root = 0
        self._behind_backward: int | None = None
        """The first event behind the backward pass of this step, where what follows is taped though no step needs it."""
        self.has_compiled_before = False
        """Whether something was compiled before the guard began: a step that differentiates must not be entered taped."""
        self._step_started = time.perf_counter()
        self.captures = GraphCaptures(self)
        self.judge.gradients.behind_graph = self.captures.behind
        self.functions = AppliedFunctions(self.log, self.steps, self.turns)
        self.undecided: list[Callable[[], None]] = []
        """What is to be noted of gradients that a transform of torch.func gave, if they are used and not differentiated."""
        self.collectives = Collectives(self.log)
        self.loaded = LoadedWeights()
        self.updated = UpdatedWeights()
        self.cut_checkpoint: Line | None = None
        """Where reentrant checkpointing ran with gradients on and was given nothing that wants one: what it runs gets none."""
        self._in_update: torch.optim.Optimizer | None = None
        """The optimizer whose step is running a closure."""
        self._follows_closure = False
        """Whether it is told when that closure returns."""

    # --- root calls -------------------------------------------------------------------------------------------------

    def enter_root(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RootCall | None:
        """Keep what a call of `module` needs to be run again. None where it is not to be recorded."""
        if self.counting:
            self.listener.on_forward()
            return None
        thread = threading.get_ident()
        if graph_task() != -1 or in_functorch() or self.turns.thread != thread:
            return None
        if HAS_CUDA and is_capturing():
            self.captures.begin_unseen()
            return None
        if self.tape.is_barred:
            return None  # a part of a compiled step, which is the call
        if self.has_compiled_before and compat.is_inside_compiled_code(sys._getframe(2)):
            return None  # a graph of a function whose call is not seen; the tape must be on at its end if it was at its start
        if self.tape.is_on_stack:
            self.tape.leave()
        if self.before_training.is_on:
            self.before_training.end()
        if dispatch_modes_on():
            return None  # the script watches this call with a dispatch mode of its own
        if not self.turns.has_begun:
            self.before_training.keep_from(self.log)
        self._has_root = self.turns.has_begun = True
        log = self.log
        modes = current_modes()
        if self.between_steps and (log.written.writes or not self.steps.count & FEW_STEPS):
            self._look_at_written("train" if modes.grad else "eval")
        if self.between_steps:
            self.carried.step_begins()
        if not modes.grad:
            self.pace.count(self.steps.backwards)
            self.pace.enter(log.kept)
        judge = self.judge
        if (log.next_index > log.closed_until and log.has_open_events) or judge.suspects or judge.outputs.unread:
            judge.settle(module, (args, kwargs))
        if self.tells_forward:
            self.listener.on_forward()
        if log.ahead.is_learning and log.finds_prepared_ahead((args, kwargs)):
            self.schedule.prefix_was(used=True)
        if log.forget_finished(bool(judge.suspects), modes.grad):
            judge.forget_judged()
        frame = sys._getframe(2)
        index = log.next_index
        log.next_index = index + 1
        if len(args) == 1 and type(args[0]) is Tensor:
            args = (log.named_argument(args[0]),)
        else:
            args = with_objects(map_tensors(args, log.named_argument), log.named_argument)
        kwargs = with_objects(map_tensors(kwargs, log.named_argument), log.named_argument) if kwargs else {}
        if modes.grad:
            self.is_amid_training = True
            if self.pace.is_open:
                self.pace.close(log.kept)
            if self.pace.is_behind:
                self.pace.end_behind(log.kept)
        training = getattr(module, "training", False)  # (a frozen ScriptModule has no such attribute)
        rng, buffers, prefix, attributes = self.context.before_call(module, training, frame)
        region = self.regions if torch.is_autocast_cache_enabled() else -1
        root = RootCall(
            index,
            module,
            args,
            kwargs,
            modes,
            rng,
            training,
            buffers,
            user_line(frame),
            prefix,
            self.steps.attempts,
            attributes,
            region=region,
        )
        if self.swapped_state is not None and self.swapped_state[0] is module:
            root.swapped_state = map_tensors(dict(self.swapped_state[1]), log.named_argument)
        else:
            root.swapped_state = self.context.computed.before_call(module, log)
        if self.steps.count < FIRST_STEPS:
            log.note_prepared(root)
        before = log.size_of_iteration if self.between_steps and index > log.iteration_start else 0
        log.append_named(root)
        if self.between_steps:
            self.schedule.begins(before)
            self._first_root = index
            self.between_steps = False
            self.captures.iteration = None
        root.started = time.perf_counter() if modes.grad else time.thread_time()
        return root

    def leave_root(self, root: RootCall, output: Any) -> None:
        """Note what the call returned, and look at it where nothing else will."""
        root.seconds = (time.perf_counter() if root.modes.grad else time.thread_time()) - root.started
        outputs = [output] if type(output) is Tensor else tensors_in(output)
        for position, tensor in enumerate(outputs):
            root.outputs.append(self.log.define(tensor, Ref(root.index, position)))
            root.floating.append(tensor.dtype.is_floating_point)
            if tensor.requires_grad:
                root.wants_gradient = True
        self.look_at_buffers(root)
        if root.attributes and root.modes.grad:
            self._find_left(root)
            self.carried.called(root)
        if not root.modes.grad:
            self.judge.outputs.look_at(root, outputs)
            self.pace.leave(self.log.kept, root.seconds)
        self.tapes_training = root.modes.grad
        if self.tapes_training and not self.schedule.training_limit:
            self._pass_over()
        self.tape.enter(self.schedule.left_for_training(self.log) if self.tapes_training else self.schedule.limit)

    def _find_left(self, root: RootCall) -> None:
        """A loss that the call kept in an attribute (of a mixture of experts, a codebook) is one of its results."""
        for place in root.attributes:
            value = place.owner.get(place.name)
            if type(value) is not Tensor or not value.requires_grad or not compat.is_made(value):
                continue
            if self.log.lookup(value) is None:  # else it was returned too, or is what the call was given
                root.left.append((place.owner, place.name))
                root.outputs.append(self.log.define(value, Ref(root.index, len(root.outputs))))
                root.floating.append(True)
                root.wants_gradient = True

    def look_at_buffers(self, root: RootCall) -> None:
        """Note what the call drew and changed, and suspect the buffers that it poisoned."""
        poisoned = self.context.after_call(root)
        if poisoned:
            self.judge.outputs.suspect_buffers(root, poisoned)
        if HAS_CUDA and (asked := self.context.buffers.take_asked()) is not None:
            self.judge.outputs.await_buffers(root, asked)

    def _pass_over(self) -> None:
        """Something of this step is not recorded."""
        self.passed_over = self.steps.count
        self.log.is_incomplete()

    def attend(self, steps: int) -> None:
        """Record all of the next steps, where one has failed of which not everything was; 0: no longer."""
        self._attends_until = (self.steps.count + steps, self.steps.backwards + MOST_PASSES * steps)
        self.schedule.attend(self.steps.count + steps)
        self.pace.attend(steps > 0)
        self.passed_over = -1

    def _look_at_written(self, mode: Literal["train", "eval"]) -> None:
        """A call begins, the first behind a step: the script may have written to weights, or made averages of them."""
        self.barrier.call(self.on_written, self.log.written.weights, self.log.slice)
        if not self.log.written.writes:
            return
        self.schedule.kept_for_weights(self.log.size_of_iteration)
        bad = self.log.written.take_bad(self.log.slice)
        if bad is not None:
            self.judge.gradients.written_weights_are_bad(bad, mode)

    def root_raised(self, root: RootCall, error: BaseException) -> None:
        """A module raised."""
        root.error = error
        self.on_raise(error)
        self.judge.refused(root.index, error)

    # --- glue -------------------------------------------------------------------------------------------------------

    def glue_raised(self, op: GlueOp, error: BaseException) -> None:
        """An operator outside every module raised."""
        op.error = error
        self.judge.refused(op.index, error)

    def tape_exhausted(self) -> None:
        """The tape met more operators than it may follow."""
        if not self._has_root and self.log.computes_with_gradients(LATELY):
            more = self.schedule.more()
            if more:  # this is no preprocessing: the step itself runs outside modules
                self.tape.left = more
                return
        if not self.turns.has_begun:
            self.log.clear()  # that was setting up
            return
        more = self.schedule.more_before() if not self._has_root else 0
        if more:
            self.tape.left = more
            return
        self._pass_over()
        self.schedule.exhausted(RootCall in map(type, self.log.kept_since(0)), self.tapes_training)

    # --- backward ---------------------------------------------------------------------------------------------------

    def before_backward(
        self, tensors: Any, gradients: Any = None, inputs: Any = None, create_graph: bool = False
    ) -> BackwardCall | None:
        """Judge the loss before it is differentiated, when everything that made it is still as it was; keep the call.

        A gradient that stays part of a loss (`create_graph`) is no result yet, and is not judged.
        """
        if self.tape.is_on_stack:
            self.tape.leave()
        self.gradients.by_hand.differentiates(inputs)
        if self.ends_run:
            self.listener.on_forward()
        if self.before_training.is_on:
            self.before_training.end()
        if self.undecided:
            self.undecided.clear()
        self.captures.last = None
        self.pace.is_open = False
        self.turns.differentiates()
        tensors = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        losses: Sequence[Tensor] = tensors
        if self.scaling.losses:
            losses = tuple(map(self.scaling.unscaled, tensors))
        self.gradients.scaler = None if all(map(operator.is_, losses, tensors)) else self.scaling.scaler
        line = user_line(sys._getframe(2))
        self.backward_calls.place = None if self.backward_calls.is_again else line
        if self.counting:
            if not create_graph:
                self.judge.count_losses(losses)
            return None
        if self.carried.has_asked:
            self.carried.read(wait=False)
        if not create_graph and inputs is not None and self._is_by_no_weight(inputs):
            self.judge.judge_beside(losses)
        elif not create_graph:
            if not self.judge.is_healthy(losses):
                self.judge.judge_losses(losses)
            elif self.carried.are_any:
                self.carried.look()
            self.carried.spoiled.clear()
        return self.backward_calls.keep(tensors, gradients, inputs, create_graph, line)

    def _is_by_no_weight(self, inputs: Any) -> bool:
        """Whether all that something is differentiated by are tensors of the script's own, where optimizers hold the weights:
        positions of a sampler, an image that is attacked."""
        if self.steps.counts_backwards or in_functorch():
            return False
        inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        are_own = all(type(t) is Tensor and t.is_leaf for t in inputs)
        return are_own and not any(self.steps.is_held(t) for t in inputs)

    def gradients_cleared(self, of: int | None) -> None:
        """`zero_grad` is called: of an optimizer (by identity), or of a module (None)."""
        if not self.counting and not self.steps.counts_backwards:
            self.gradients.cleared(of, self.scaling.scaler)

    def after_backward(self) -> None:
        """The graph is used up: events before now are kept only while their results are."""
        before, self.log.closed_until = self.log.closed_until, self.log.next_index
        self.tells_forward = True  # until an optimizer has stepped: perhaps the step is passed over
        self.scaling.losses.clear()
        self.steps.passed_backward(self.gradients.scaler is not None, self.judge.gradients.parameters_of_modules)
        if self.pace.is_attentive:
            until, passes = self._attends_until
            if self.steps.count >= until or self.steps.backwards >= passes:  # (a script may pass over its steps)
                self.attend(0)
        self.gradients.differentiated()
        if self._in_update is not None:  # in a closure
            if not self._follows_closure:  # what follows may be the optimizer's own arithmetic
                self._closure_differentiated(self._in_update)
            elif self.gradients.remade.are_used or self.steps.count < FIRST_STEPS:
                self.resume_tape()
            return
        has_ended: bool | None = None
        if self.steps.counts_backwards:
            if not self.counting:
                self.gradients.used_by_hand()
            self.gradients.by_hand.inputs = ()
            begun = self._passes_since = before if self._passes_since is None else self._passes_since
            has_ended = self.steps.differentiated(self.backward_calls.place)
        if has_ended:
            self._passes_since = None
            self._end_iteration(hangs_together=True)
            self.log.iteration_start = begun  # perhaps more backward passes make one step
            self.log.forget_before(begun)  # each update starts from the last one's weights
            self.resume_tape()
        elif (
            has_ended is False
            or self.log.goes_on_after_backward
            or self.gradients.remade.are_used
            or self.carried.leaving.is_behind_backward
        ):
            self.resume_tape()
        elif self.schedule.tapes_behind_backward(self.steps.count, self.step_seconds):
            self._behind_backward = self.log.next_index
            self.resume_tape(is_behind_backward=True)

    # --- optimizer and steps ----------------------------------------------------------------------------------------

    def before_update(
        self,
        optimizer: torch.optim.Optimizer,
        by_scaler: bool,
        has_closure: bool = False,
        follows_closure: bool = False,
    ) -> None:
        """An optimizer is about to change its parameters (or the scaler to let it, which waits for the device itself)."""
        if self.tape.is_on_stack:
            self.tape.leave()
        if self.ends_run:
            self.listener.on_forward()
        if self.gradients.on_device.waiting is not None:
            self.gradients.on_device.read()
        if self.undecided:
            self._decided()
        if self.judge.outputs.asked:
            self.judge.read_buffers()
        if self.judge.suspects:
            self.judge.settle_before_write(p for group in optimizer.param_groups for p in group["params"])
        if self.carried.has_asked:
            self.carried.read(wait=True)
        if self._behind_backward is not None:
            self.schedule.was_behind_backward(self.log.next_index - self._behind_backward)
        is_taped = self.carried.leaving.is_behind_backward or self._behind_backward is not None
        if is_taped and self.carried.are_any and not self.counting:
            self.carried.look(asks_device=False)
        if self.steps.count < FIRST_STEPS and not self.counting:
            self.gradients.remade.learn(gradients_of(optimizer))
            if self.on_first_update is not None:
                on_first_update, self.on_first_update = self.on_first_update, None
                on_first_update()
        if by_scaler:
            self.gradients.are_looked_at_by_scaler(optimizer, self.scaling.is_unscaled)
            return
        self.judge.read_flags(wait=True)
        if has_closure:
            self._in_update = optimizer  # its closure calls backward: the gradients are judged then
            self._follows_closure = follows_closure
            self.preprocessing.closure_begins()
        elif not self.counting:
            self.gradients.about_to_be_used(optimizer)

    def closure_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's closure returns: what it has made of the gradients (clipped, centred) is what is used."""
        self.tape.leave()
        if self._in_update is optimizer and self.gradients.is_unjudged:
            if self.steps.count < FIRST_STEPS and not self.counting:
                self.gradients.remade.learn(gradients_of(optimizer))
            self._closure_differentiated(optimizer)

    def _closure_differentiated(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.counting:
            self.gradients.about_to_be_used(optimizer)

    def _decided(self) -> None:
        """An optimizer steps, and nothing was differentiated since: it uses what torch.func's transforms gave."""
        undecided, self.undecided = self.undecided, []
        for note in undecided:
            note()
        self.tape.leave()

    def after_update(self, optimizer: torch.optim.Optimizer, skipped: bool = False) -> None:
        """An optimizer's step was attempted (a step that the scaler skipped included)."""
        if self.judge.unread:
            self.judge.read_flags(wait=True)
        self._in_update = None
        self.updated.note(optimizer)
        if self.steps.attempted(optimizer, skipped):
            if self.gradients.on_device.has_asked:
                self.gradients.on_device.iteration_ends()
            self._end_iteration(hangs_together=False)

    def updated_in_graph(self, optimizer: torch.optim.Optimizer) -> None:
        """A replay of a CUDA graph has made an optimizer's step. The device is not waited for: the script does not, either."""
        self.judge.read_flags(wait=False)
        if self.steps.attempted(optimizer, False):
            self._end_iteration(hangs_together=False)

    def differentiated_in_graph(self, place: Line | None) -> None:
        """A replay of a CUDA graph has made a backward pass, and perhaps by that a step, where no optimizer is known."""
        self.tells_forward = True
        self.steps.passed_backward()
        if self.steps.counts_backwards and self.steps.differentiated(place):
            self._end_iteration(hangs_together=True)

    @property
    def in_closure_of(self) -> torch.optim.Optimizer | None:
        """The optimizer that is in the middle of a step, and has called its closure."""
        return self._in_update

    @property
    def is_in_closure(self) -> bool:
        """Whether an optimizer is in the middle of a step, and has called its closure."""
        return self._in_update is not None

    def _end_iteration(self, hangs_together: bool) -> None:
        """`hangs_together`: there is no optimizer, and a backward pass stands for its step."""
        now = time.perf_counter()
        seconds = now - self._step_started
        self._step_started = now
        self.step_seconds = seconds if not self.step_seconds else min(0.8 * self.step_seconds + 0.2 * seconds, 1e4)
        self.between_steps = True
        self.is_amid_training = False
        self.preprocessing.backwards_before = self.steps.backwards
        if self.counting:
            self._count_iteration(hangs_together)
            return
        if hangs_together:
            self.schedule.prefix_was(used=False)  # the tape is on all the time
        elif self.schedule.wonders(self.steps.count):
            events, writers = self.log.record.events, self.log.producers.writers
            used = uses_computed(events, self.log.iteration_start, self._first_root, writers)
            used = used or self.log.ahead.is_usual or self.schedule.keeps_for_weights
            self.schedule.prefix_was(used, writes_state=self.carried.leaving.is_between_steps)
            self.preprocessing.wonder()
        self.preprocessing.cleared_at = -1
        self.schedule.ended(self.steps.count, seconds, self.step_seconds, self._has_root, self.log.size_of_iteration)
        self.tape.keeps_calls = self.schedule.keeps_calls and not (hangs_together and self.schedule.is_functional)
        self._has_root = False
        if (
            self.gradients.remade.are_used
            or self.carried.leaving.is_behind_backward
            or self._behind_backward is not None
        ):
            self.log.closed_until = self.log.next_index  # gradients that were used are not held on to; state is given
        self._behind_backward = None
        if self.live is not None:
            self.live.begin_step()
        if not hangs_together or self.steps.count != self._steps_told:  # (else it belongs to the one that was told)
            self._steps_told = self.steps.count
            self.listener.on_step(self.steps.count)
        self.captures.iteration_ends()
        self.carried.iteration_ends(self._first_root, self.schedule, self.step_seconds)
        self.log.iteration_ended(is_all=not hangs_together)
        if (
            self.schedule.is_functional
            and not hangs_together
            and self.log.forget_finished(bool(self.judge.suspects), torch.is_grad_enabled())
        ):
            self.judge.forget_judged()

    def _count_iteration(self, hangs_together: bool) -> None:
        """An iteration ends of which nothing was recorded."""
        self._has_root = False
        if not self.log.is_empty:
            self.log.clear()
        if not hangs_together or self.steps.count != self._steps_told:
            self._steps_told = self.steps.count
            self.listener.on_step(self.steps.count)

    def resume_tape(self, is_behind_backward: bool = False) -> None:
        """Go on taping after `torch.autograd.grad` in the middle of a loss."""
        if self.turns.thread == threading.get_ident() and not self.paused:
            self.tapes_training = True
            enter = self.tape.enter_behind_backward if is_behind_backward else self.tape.enter
            enter(self.schedule.left_for_training(self.log))

    # --- other threads ------------------------------------------------------------------------------------------------

    def _begin_anew(self, thread: int) -> None:
        """Another thread is followed from here on."""
        self.tape.left = 0  # what its thread goes on to compute is not this one's
        self.left_behind.add(self.tape)
        self.tape = GlueTape(self, thread)
        self.log.clear()

    # --- the end, and investigations ----------------------------------------------------------------------------------

    def flush(self, error: BaseException | None = None) -> None:
        """The script ends, perhaps with an error: judge what is left."""
        self.tape.leave()
        self.gradients.on_device.read()
        self.gradients.by_hand.read()
        self.judge.settle_last(error)
        if error is not None and not self.turns.has_begun:
            self._ended_before_training(error)

    def _ended_before_training(self, error: BaseException) -> None:
        """The script has refused numbers before its first step: were they made bad by what it computed until then?"""
        found = self.before_training.refused_by(error)
        if found is not None:
            record, ref = found
            self._report(BadResult("loss", "train", 0, record, (ref,), is_of_preparation=True, has_ended_run=True))

    def _is_trial(self, bad: BadResult) -> bool:
        """Whether an optimizer that is in the middle of a step has only looked at a point, without gradients (a line search):
        one that is not finite is given up, and what is not shows in the training."""
        optimizer = self._in_update
        if optimizer is None or bad.mode != "eval" or bad.error is not None:
            return False
        codes = (frame for frame in frames_up(sys._getframe(1), MAX_FRAMES) if frame.f_code.co_name == "step")
        return any(locals_of(f).get((*f.f_code.co_varnames, "")[0]) is optimizer for f in codes)

    def _report(self, bad: BadResult) -> None:
        if self._is_trial(bad):
            return
        if self.gradients.on_device.waiting is not None:
            self.gradients.on_device.read()  # what came before it
        if self.gradients.by_hand.waiting is not None:
            self.gradients.by_hand.read()
        paused, self.paused = self.paused, True
        if self.tape.is_on_stack:
            self.tape.leave()
        started = time.perf_counter()
        try:
            self.listener.on_bad(bad)
        finally:
            self.paused = paused
            self._step_started += time.perf_counter() - started  # our own time does not count as the script's step
