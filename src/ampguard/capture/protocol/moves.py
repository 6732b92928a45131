"""The calls of a training loop, told to the state machine in the order in which they happen.

`frame` is the caller's: the line of the script is looked up in it only where it may be needed.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.frames import user_line
from ampguard.capture.protocol import meant_sums
from ampguard.capture.protocol.carried_scales import CarriedScales
from ampguard.capture.protocol.clipped import ClippedGradients
from ampguard.capture.protocol.close_look import CloseLook
from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.in_backward import StepsInBackward
from ampguard.capture.protocol.listener import BreachListener
from ampguard.capture.protocol.loss_scale import DeviceScale, SquaredScale
from ampguard.capture.protocol.norms import Norms
from ampguard.capture.protocol.penalties import Penalties
from ampguard.capture.protocol.put_in import PutIn
from ampguard.capture.protocol.refusals import Refusals
from ampguard.capture.protocol.routine import Routine
from ampguard.capture.protocol.script_lines import script_line
from ampguard.capture.protocol.second_looks import SecondLooks
from ampguard.capture.protocol.threads import TrainingThread
from ampguard.capture.protocol.usual_backward import UsualBackward
from ampguard.capture.protocol.watches import ScalerWatch, Watches, only_scales_itself
from ampguard.capture.record import Line
from ampguard.capture.recorder import FlightRecorder
from ampguard.protocol.events import (
    Backward,
    Breach,
    Clear,
    Event,
    Rescale,
    Step,
    Unscale,
    Update,
)
from ampguard.protocol.machine import PILED_STEPS, Machine
from ampguard.protocol.states import Stage

ZERO_CHECKS = 8

ONE_IN = 3
"""Where gradients pile up in fewer than one of so many steps, something else may be meant (a last window, cleared late)."""

Frame = FrameType | None


class Moves:
    """Feeds the machine. Every method is called through the fault barrier."""

    def __init__(self, recorder: FlightRecorder, listener: BreachListener) -> None:
        self.recorder = recorder
        self.listener = listener
        self.machine = Machine()
        self.watches = Watches(self.machine.forget)
        self.training = TrainingThread(self.watches, self.lose_track)
        self.read_scaled: Breach | None = None
        """The last norm of gradients that was read while they were scaled."""
        self.is_lost = False
        """Calls of this iteration went unseen: what its gradients are is not known until it has ended."""
        self.carried = CarriedScales(self.machine, self.watches)
        self.close = CloseLook(self)
        self.in_backward = StepsInBackward(self)
        self.clipped = ClippedGradients(self)
        self.penalties = Penalties(self)
        self.norms = Norms(self)
        self.refusals = Refusals(self)
        self.second_looks = SecondLooks(self)
        self.usual_backward = UsualBackward(self)
        self.put_in = PutIn(lambda: self.watches.optimizers)
        self.attempt = 0
        """The iteration of the last attempted step."""
        self._attempts = 0
        """Optimizers' steps that had been attempted before it."""
        self.scale_was_read = False
        """The script asked for the scale since the last backward: it may divide by hand."""
        self.scale_read_at: Line | None = None
        """Where, in an iteration that is looked at closely."""
        self.sums_up_scaled = False
        """The script keeps gradients that are still scaled, and adds them to those of later iterations."""
        self.looks_closely: bool = True
        self.looks_on = False
        """The iteration after this one is to be looked at as well."""
        self.stepping: tuple[ScalerWatch, OptimizerWatch, Line | None] | None = None
        """The scaler's step that is under way: the optimizer's own step and unscaling are part of it."""
        self.unscaled_inside = False
        self.differentiated_inside = False
        """A closure has made new gradients in the scaler's step, after that had unscaled."""
        self.routine = Routine(self.machine, recorder.barrier.call)
        self._next: tuple[DeviceScale | SquaredScale | None, bool] = (None, True)
        self._step_frame: Frame = None
        self._made_of_gradients: set[tuple[CodeType, int]] = set()
        """Where losses are differentiated that carry a scale because they are made of gradients that do."""
        self._untouched = True
        self._zero_checks = 0
        self.is_stale: Callable[[OptimizerWatch, int], bool] = lambda watch, since: watch.is_stale
        """Whether an optimizer holds tensors that nobody trains any more, which is told then, of that iteration."""
        self.told_untrained: set[int] = set()
        """Identities of parameters that were told as held by no optimizer."""

    @property
    def scales(self) -> bool:
        """Whether a scaler has scaled a loss so far."""
        scalers = self.watches.scalers
        return bool(scalers) and any(watch.uses and watch.is_enabled for watch in scalers)

    @property
    def is_scaled(self) -> bool:
        """Whether the loss that is about to be differentiated carries a scale."""
        return self._next[0] is not None

    # --- threads ------------------------------------------------------------------------------------------------------

    def mine(self) -> list[OptimizerWatch]:
        """The optimizers of the calling thread: of others, no gradient is ever looked at."""
        me = get_ident()
        return [watch for watch in self.watches.optimizers if watch.thread == me]

    def lose_track(self) -> None:
        """Some calls went unseen, or another thread is followed from here on: nothing is known of any gradient."""
        self.routine.spoil()
        for watch in (*self.watches.optimizers, *self.watches.scalers):
            self.machine.forget(watch)
        self.is_lost = True
        self.carried.fresh = self.stepping = None
        self.scale_was_read = True
        self.usual_backward.forget()

    def let_go(self) -> None:
        """A CUDA graph is about to be captured: nothing may be left of what was differentiated before."""
        self.lose_track()
        self.carried.losses.forget_dead()
        self.carried.taken.forget()
        self.close.forget()
        self.penalties.forget()

    def scales_in_graph(self, scaler: Any) -> None:
        """A CUDA graph holds the scaling of a loss."""
        self.watches.scaler(scaler).uses += 1

    # --- scaling and backward -----------------------------------------------------------------------------------------

    def created(self, optimizer: Optimizer, frame: Frame) -> None:
        self.watches.optimizer(optimizer, script_line(frame))

    def scale_read(self, scaler: Any) -> None:
        """Somebody has asked a scaler for its scale."""
        self.scale_was_read = True
        self.watches.scaler(scaler).was_asked = True
        if self.looks_closely:
            self.scale_read_at = script_line(sys._getframe(1))

    def scaler_created(self, scaler: Any, frame: Frame) -> None:
        self.watches.scaler(scaler, script_line(frame))

    def scaled(self, of: ScalerWatch, result: Any) -> None:
        """`scaler.scale()` returned `result`."""
        of.uses += 1
        self.carried.scaled(of, result)
        if of.uses == 1:
            of.used_at = script_line(sys._getframe(1))
            of.is_own = of.is_own or only_scales_itself(of.ref())

    def before_backward(self, losses: Any, gradients: Any, frame: Frame = None) -> None:
        """Note what the gradients are before they change, and by what the loss was scaled."""
        machine, me = self.machine, get_ident()
        for watch in self.watches.optimizers:
            if watch.thread != me:
                continue
            is_empty = watch.before_backward()
            if watch.copy is not None and not is_empty:
                self.close.note_division(watch)
            stage = machine.stage(watch)
            if stage is Stage.UNSCALED and not is_empty:
                self.refusals.added_to_unscaled(watch, losses)
            if stage is not Stage.EMPTY and (is_empty or (stage is Stage.USED and self._was_zeroed(watch))):
                self.clipped.gone(watch)
                machine.feed(Clear(watch))
        self.carried.losses.of_several = False
        self._next = self._scale_of(losses, gradients, frame)
        if self.looks_closely:
            if self._next[0] is not None:
                self.in_backward.begins(self._next[0], frame)
                if losses is self.carried.fresh and self.carried.is_scaled_twice(losses):
                    self._next = SquaredScale(self._next[0]), self._next[1]
            self.close.before_backward(losses, self._next[0] is not None)
            self.penalties.before_backward(losses, self._next[0] is not None and not self.carried.by_gradients)

    def _scale_of(self, losses: Any, gradients: Any, frame: Frame) -> tuple[DeviceScale | None, bool]:
        """What a loss that is made of scaled gradients carries is looked for in iterations that are looked at closely: it is
        taken to be the same in others."""
        found = self.carried.scale_of(losses, gradients)
        place = (frame.f_code, frame.f_lasti) if frame is not None else None
        if self.carried.by_gradients and place is not None:
            self._made_of_gradients.add(place)
        elif found[0] is None and not self.looks_closely and place in self._made_of_gradients:
            scales = [of.current_scale() for of in self.watches.scalers if of.is_enabled and of.uses]
            return (scales[0], False) if len(scales) == 1 else found
        return found

    def _was_zeroed(self, watch: OptimizerWatch) -> bool:
        """In place, by a loop of the script's own: looked at a few times only where looking waits for a device."""
        if self._zero_checks >= ZERO_CHECKS and not watch.sample[0].is_cpu:
            return False
        self._zero_checks += 1
        return watch.are_zero()

    def after_backward(self, frame: FrameType) -> tuple[OptimizerWatch, ...]:
        """Tell the machine whose gradients have changed."""
        scale, is_plain = self._next
        self.in_backward.ends()
        self.differentiated_inside = self.stepping is not None
        closely = self.looks_closely
        mine = self.mine()
        was_empty = {watch: watch.before is None or watch.before[0][0] is None for watch in mine}
        reached = () if self.is_lost else tuple([w for w in mine if w.after_backward()])
        self.scale_was_read = False
        self.scale_read_at = None
        if not reached and not self.is_lost:
            self.carried.plain_outside = scale is None
            if isinstance(scale, DeviceScale):
                self.carried.ended_outside = scale
        event = Backward(reached, scale, script_line(frame), is_plain and scale is not None)
        if self.carried.losses.of_several:
            self.routine.spoil()
            for watch in reached:
                self.machine.forget(watch)
            return reached
        self.machine.feed(event)
        empty = tuple([was_empty[watch] for watch in reached])
        self.routine.note(("backward", scale is not None, frame.f_code, frame.f_lasti, empty), event)
        if event.also_plain:
            self.routine.spoil()
        if closely:
            self.close.after_backward(reached, scale.once if isinstance(scale, SquaredScale) else scale, event.where)
            self.penalties.after_backward(reached, event.where)
        return reached

    # --- the scaler ---------------------------------------------------------------------------------------------------

    def before_unscale(self, scaler: Any, optimizer: Optimizer, frame: Frame) -> None:
        """Somebody may have done to the gradients what the scaler is about to do."""
        watch = self._claimed(optimizer)
        self.second_looks.divided(watch)
        self.clipped.used(watch)
        self.close.before_unscale(watch, self.watches.scaler(scaler), frame)

    def unscaled(self, scaler: Any, optimizer: Optimizer, frame: Frame) -> None:
        """The script has let the scaler divide an optimizer's gradients."""
        of = self.watches.scaler(scaler)
        if not of.is_enabled:
            return
        watch = self.watches.optimizer(optimizer)
        watch.scaled_by = of
        event = Unscale(watch, of, of.current_scale(), script_line(frame))
        self.machine.feed(event)
        watch.rest()
        if self.looks_closely:
            watch.keep_weights()
            watch.keep_copy()
            self.close.divided(watch, event.where)
        if frame is not None:
            self.routine.note(("unscale", of, watch, frame.f_code, frame.f_lasti), event)

    def rescaled(self, scaler: Any, optimizer: Optimizer, frame: Frame) -> None:
        """Who drives a scaler of its own (our engine) has multiplied gradients again that were divided."""
        self.routine.spoil()
        of, watch = self.watches.scaler(scaler), self._claimed(optimizer)
        self.machine.feed(Rescale(watch, of, of.current_scale(), script_line(frame)))
        watch.rest()
        watch.copy = None

    def before_scaler_step(self, scaler: Any, optimizer: Optimizer, frame: Frame) -> None:
        watch, of = self._claimed(optimizer), self.watches.scaler(scaler)
        self.clipped.used(watch)
        watch.stepped = False
        self.unscaled_inside = self.differentiated_inside = False
        self.attempt = self.recorder.steps.count
        self._attempts = self.recorder.steps.attempts
        self.stepping = (of, watch, script_line(frame))
        self._step_frame = frame
        if self.machine.stage(watch) is Stage.SCALED:
            self.second_looks.divided(watch)
        if of.is_enabled and (watch.copy is not None or self.looks_closely or watch.was_bad):
            self.close.before_unscale(watch, of, frame)

    def after_scaler_step(self, scaler: Any, optimizer: Optimizer) -> tuple[ScalerWatch, OptimizerWatch]:
        """The scaler has stepped, or skipped."""
        assert self.stepping is not None
        of, watch, where = self.stepping
        self.stepping = None
        self._see_if_joined()
        watch.steps += 1
        watch.taken += watch.stepped
        watch.was_skipped = not watch.stepped
        watch.by_scaler = True
        watch.scaled_by = of
        watch.weights = []
        if of.is_enabled:
            of.steps += 1
            unscales = self.unscaled_inside or compat.unscales_as_it_steps(optimizer)
            scale = of.current_scale() if unscales and not self.differentiated_inside else None
            by_closure = self.differentiated_inside
            event = Step(
                watch, of, where, watch.was_skipped, scale, by_closure=by_closure, was_divided=self.unscaled_inside
            )
        else:
            event = Step(watch, None, where)
        frame, self._step_frame = self._step_frame, None
        if frame is not None:
            self.routine.note(("step", of, watch, frame.f_code, frame.f_lasti), event)
        if self.looks_closely and self.unscaled_inside:
            self.close.divided(watch, where)
        breaches = self.machine.feed(event)
        self._note_piled(watch)
        for breach in breaches:
            breach.facts["stepped"] = optimizer
        self._forget_set_by_hand(watch)
        if self.sums_up_scaled and watch.was_skipped:
            self.second_looks.ask(watch)
        watch.rest()
        ledger = self.machine.ledger(watch)
        idle = ledger.idle_steps
        has_lost = not (of.is_enabled or watch.candidates or watch.has_gradients())
        watch.lost_one = watch.lost_one or ledger.steps_without_a_pass == 1 or has_lost
        if breaches or idle:
            self.routine.spoil()
        if breaches and of.is_own:
            self.tell(breaches, self.attempt)
        if not of.is_enabled and not self.scales and self.recorder.between_steps:
            self.routine.iteration_ended(not self.looks_closely)  # its update does nothing
        return of, watch

    def _see_if_joined(self) -> None:
        """An optimizer has stepped: it may have joined, and belong to the iteration that another one seemed to have ended."""
        steps = self.recorder.steps
        if steps.attempts > self._attempts and steps.count - steps.is_over < self.attempt:
            self.attempt -= 1

    def before_update(self, of: ScalerWatch) -> None:
        """Keep the scale: gradients are about that carry it."""
        if of.scale is not None:
            of.scale.keep()

    def updated(self, of: ScalerWatch, frame: FrameType) -> None:
        """The scale may have changed."""
        of.scale = None
        self.carried.fresh = None
        self.carried.taken.forget()
        self.is_lost = False
        self.close.forget()
        self.penalties.forget()
        event = Update(of, script_line(frame))
        self.machine.feed(event)
        self.carried.losses.forget_dead()
        self.routine.note(("update", of, frame.f_code, frame.f_lasti), event)
        if self.close.divides_by_another(of) or (self.sums_up_scaled and compat.grows_next(of.ref())):
            self.second_looks.ask(*self.mine())
        self.routine.iteration_ended(not (self.looks_closely or self.sums_up_scaled))

    def _claimed(self, optimizer: Optimizer) -> OptimizerWatch:
        """Its watch; the optimizer is the calling thread's from here on."""
        watch = self.watches.optimizer(optimizer)
        watch.claim(get_ident())
        return watch

    def _forget_set_by_hand(self, watch: OptimizerWatch) -> None:
        """The script will put new gradients in place, and nothing but a close look will tell."""
        if watch.set_by_hand:
            watch.set_by_hand = False
            self.machine.feed(Clear(watch))

    # --- optimizers ---------------------------------------------------------------------------------------------------

    def before_direct_step(self, optimizer: Optimizer) -> None:
        """An optimizer's own step begins, without a scaler."""
        if self.scales:
            self.routine.spoil()
        watch = self._claimed(optimizer)
        self.close.before_direct_step(watch)
        self.attempt = self.recorder.steps.count
        self._attempts = self.recorder.steps.attempts
        stage = self.machine.stage(watch)
        repeats = stage is Stage.USED and watch.by_scaler
        is_untouched = watch.is_untouched() and not (watch.divides_in_hook or watch.divides_by_hand)
        self._untouched = (stage in _TRUE and not repeats) or is_untouched or self.close.still_carries_scale(watch)

    def after_direct_step(self, optimizer: Optimizer, frame: Frame) -> OptimizerWatch:
        """It has stepped."""
        watch = self.watches.optimizer(optimizer)
        self.is_lost = False
        self._see_if_joined()
        watch.steps += 1
        watch.taken += 1
        found_inf = None
        stage = self.machine.stage(watch)
        if stage is Stage.UNSCALED:
            found_inf = any(compat.found_inf(w.ref(), optimizer) for w in self.watches.scalers)
        elif stage is Stage.USED and watch.was_skipped:
            self.attempt = max(self.attempt - 1, 0)  # that step was the iteration's
            found_inf = watch.are_bad()
        watch.was_skipped = watch.by_scaler = False
        watch.weights = []
        watch.lost_one = watch.lost_one or not watch.has_gradients()
        step = Step(watch, None, script_line(frame), False, None, self._untouched, found_inf)
        breaches = self.machine.feed(step)
        self._note_piled(watch)
        self.clipped.stepped_past(watch, breaches)
        self.tell(breaches, self.attempt)
        self._forget_set_by_hand(watch)
        watch.lost_one = watch.lost_one or self.machine.ledger(watch).steps_without_a_pass == 1
        if not self.scales:
            self.routine.note(("direct step", watch, user_line(frame)), step)
            if self.recorder.between_steps:  # it was the last optimizer of its iteration
                self.routine.iteration_ended(not self.looks_closely)
        return watch

    def cleared(self, optimizer: Optimizer, frame: Frame) -> None:
        """zero_grad of an optimizer, before it has stepped."""
        watch = self._claimed(optimizer)
        self.clipped.gone(watch)
        is_routine = frame is not None and self.machine.stage(watch) in _UNUSED
        if self.routine.is_on or not is_routine:
            self.routine.spoil()
        event = Clear(watch, script_line(frame))
        self.machine.feed(event)
        if is_routine and frame is not None:
            self.routine.note(("clear", watch, frame.f_code, frame.f_lasti), event)

    def cleared_by_module(self, module: nn.Module, frame: FrameType) -> None:
        """zero_grad of a module: whichever optimizers' gradients are gone now."""
        key = ("module clear", id(module), frame.f_code, frame.f_lasti)
        mine = self.mine()
        are_gone = not any(watch.has_gradients() for watch in mine)
        if self.routine.is_on and are_gone and self.routine.matches(key):
            return
        cleared: list[Event] = []
        for watch in mine:
            watch.is_used = True
            if self.machine.stage(watch) is not Stage.EMPTY and (not watch.has_gradients() or watch.are_zero()):
                self.clipped.gone(watch)
                cleared.append(Clear(watch, script_line(frame)))
                self.machine.feed(cleared[-1])
        if are_gone and len(cleared) <= 1:
            self.routine.note(key, cleared[0] if cleared else None)
        else:
            self.routine.spoil()

    def _note_piled(self, watch: OptimizerWatch) -> None:
        if watch.piled_since is None and self.machine.ledger(watch).piled_up:
            watch.piled_since = self.attempt
            watch.piled_on = {id(p): weakref.ref(p.grad) for p in watch.parameters() if p.grad is not None}

    def tell(self, breaches: Sequence[Breach], step: int) -> None:
        for breach in breaches:
            self.routine.spoil()
            if breach.cause == "clip-before-unscale" and not breach.facts.get("clips"):
                self.read_scaled = breach
            may_be_stale = breach.cause == "missing-zero-grad" and not breach.facts.get("in_masters")
            if may_be_stale and self._is_of_stale(breach.optimizer, self._began(breach, step)):
                continue  # told as such: what it holds is never cleared because nobody else knows it
            if self._is_rare(breach) or self._is_sum_meant(breach):
                continue
            self._count_steps(breach)
            self._say_which(breach)
            if breach.facts.get("zeros") and not self._steps_with_zeros(breach.optimizer):
                continue
            self.name_scaler(breach)
            self.listener.on_breach(breach, self._began(breach, step))

    def _is_of_stale(self, watch: Any, since: int) -> bool:
        return isinstance(watch, OptimizerWatch) and self.is_stale(watch, since)

    def _steps_with_zeros(self, watch: Any) -> bool:
        """Whether the gradients that it has just stepped with are 0, and nobody else trains: the script may also have put others
        in place, or freeze a part of the model for a time."""
        return len(self.watches.optimizers) == 1 and bool(watch.are_zero())

    @staticmethod
    def _is_sum_meant(breach: Breach) -> bool:
        """Whether gradients pile up because the optimizer computes its weights from their sum."""
        watch = breach.optimizer
        if breach.cause != "missing-zero-grad" or "in_all" not in breach.facts or not isinstance(watch, OptimizerWatch):
            return False
        if watch.sums_on_purpose is None:
            # PyTorch's own add each step up: what grows fast enough alone looks like a function of the sum.
            optimizer = watch.ref()
            is_own = optimizer is None or not compat.is_of_pytorch(type(optimizer))
            watch.sums_on_purpose = is_own and meant_sums.are_meant(watch.parameters())
        return watch.sums_on_purpose

    @staticmethod
    def _is_rare(breach: Breach) -> bool:
        """Whether gradients pile up, but never in several steps in a row, and in few of all."""
        watch = breach.optimizer
        if not _is_now_and_then(breach) or not isinstance(watch, OptimizerWatch):
            return False
        return int(breach.facts["in_all"]) * ONE_IN < watch.steps

    @staticmethod
    def _count_steps(breach: Breach) -> None:
        """Say of how many steps those are in which gradients pile up now and then, and since when."""
        watch = breach.optimizer
        if _is_now_and_then(breach) and isinstance(watch, OptimizerWatch):
            breach.facts |= {"of_steps": watch.steps, "since": watch.piled_since}
            watch.piled_since = None

    @staticmethod
    def _say_which(breach: Breach) -> None:
        """Where gradients pile up in some of the optimizer's parameters only, and those of the others are made anew: in which."""
        watch = breach.optimizer
        if breach.cause != "missing-zero-grad" or "in_all" not in breach.facts or not isinstance(watch, OptimizerWatch):
            return
        held = [p for p in watch.parameters() if p.grad is not None]
        old = [p for p in held if (seen := watch.piled_on.get(id(p))) is not None and seen() is p.grad]
        if 0 < len(old) < len(held):
            breach.facts |= {"parameters": old, "of_parameters": len(held)}

    @staticmethod
    def _began(breach: Breach, step: int) -> int:
        """The iteration to tell it of: one that has to be seen several times began with the first."""
        if "of_steps" in breach.facts and breach.facts["since"] is not None:
            return int(breach.facts["since"])
        is_piled = breach.cause == "missing-zero-grad" and not breach.facts.keys() & {"by_hand", "is_stuck"}
        is_counted = is_piled or bool(breach.facts.get("zeros"))
        earliest = getattr(breach.optimizer, "first_step", None) or 0
        return max(earliest, step + 1 - int(breach.facts["steps"])) if is_counted else step

    def name_scaler(self, breach: Breach) -> None:
        if breach.scaler is None and breach.optimizer is not None:
            breach.scaler = next((w for w in self.watches.scalers if w.is_enabled and w.uses), None)


def _is_now_and_then(breach: Breach) -> bool:
    """Whether steps on top of old gradients are told that did not come in a row."""
    return "in_all" in breach.facts and breach.facts["steps"] < PILED_STEPS


_UNUSED = (Stage.PLAIN, Stage.SCALED)
"""What is cleared in every iteration of some loops: a critic's gradients of the generator's loss."""

_TRUE = (Stage.EMPTY, Stage.PLAIN, Stage.UNSCALED, Stage.USED)
