"""What a script does to gradients by itself, seen in the iterations that are looked at closely.

It may divide by the scale, add gradients of another loss, clip in hooks, scale without a scaler, or give one parameter to
two optimizers. All of it is found by comparing a few small gradients with copies of them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ampguard import compat
from ampguard.capture.protocol.added import AddedGradients
from ampguard.capture.protocol.assigned import AssignedGradients
from ampguard.capture.protocol.gradients import Comparison, OptimizerWatch
from ampguard.capture.protocol.graph_hooks import GraphHooks
from ampguard.capture.protocol.hand_scale import HandScale
from ampguard.capture.protocol.handed_over import HandedOver
from ampguard.capture.protocol.leaf_hooks import SMALLEST_LIMIT, HookClip, HookDivision, LeafHooks, clip_of
from ampguard.capture.protocol.loss_scale import DeviceScale
from ampguard.capture.protocol.of_weights import MadeOfWeights
from ampguard.capture.protocol.script_lines import names_scale, script_line
from ampguard.capture.protocol.shared import SharedParameters
from ampguard.capture.protocol.watches import ScalerWatch
from ampguard.capture.record import Line
from ampguard.protocol.events import Backward, Breach, Clear, Divided, Read
from ampguard.protocol.states import Stage

if TYPE_CHECKING:
    from ampguard.capture.protocol.moves import Frame, Moves

MOST_HIDDEN = 3
"""Steps that are told in which the script has hidden an overflow from the scaler."""

HAND_SCALE = 8.0
"""A smaller number may divide gradients for many reasons (ranks, accumulation)."""

ABOUT = 4.0
"""By which factor the length of a gradient may have changed beside, where others were added to it."""


class CloseLook:
    """Asked by the moves, of which it tells the machine and the listener as they do."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self.on_gradient: Callable[[Tensor, OptimizerWatch | None], None] = lambda gradient, watch: None
        """Told of each gradient that a hook of the script's is about to get."""
        self._hooks = LeafHooks(self._arrives)
        self.graph_hooks = GraphHooks(self._looks_at_hook, moves.recorder.barrier.call, self._arrives)
        self.clips_in_hook = False
        """A hook was seen to clip in the last backward pass."""
        self._shared = SharedParameters()
        self._as_left: list[Any] = []
        self._at_rest: list[OptimizerWatch] = []
        """Those whose gradients nobody has written to when clipping began."""
        self._mixed_since: weakref.WeakKeyDictionary[OptimizerWatch, int] = weakref.WeakKeyDictionary()
        """The iteration in which it was first given gradients made of scaled and of unscaled ones."""
        self._by_hand: weakref.WeakKeyDictionary[OptimizerWatch, float] = weakref.WeakKeyDictionary()
        """By which scale the script has divided the gradients of an optimizer itself."""
        self.added = AddedGradients()
        self.assigned = AssignedGradients()
        self.own_scale = HandScale()
        self.handed_over = HandedOver(moves)
        self.of_weights = MadeOfWeights(moves)

    def _arrives(self, gradient: Tensor, watch: OptimizerWatch | None) -> None:
        self.on_gradient(gradient, watch)

    @property
    def has_hooks(self) -> bool:
        """Whether hooks of the script's may run in the backward pass that is about to begin."""
        return self._hooks.are_there or self.graph_hooks.are_there

    @property
    def left_by_hooks(self) -> list[Tensor]:
        """What the hooks on parameters have made of gradients in the last pass that was looked at."""
        return self._hooks.left

    def _looks_at_hook(self, is_new: bool) -> bool:
        """The script puts a hook into the graph: one that was never seen before makes the iteration one to look at."""
        moves = self._moves
        if is_new and moves.scales and not moves.looks_closely:
            moves.second_looks.ask(*moves.mine())
        return moves.looks_closely

    def hook_on_leaf(self, hook: Any, frame: Frame) -> None:
        """The script puts a hook on a parameter."""
        self.graph_hooks.on_leaf(hook)
        self._hooks.note(hook, script_line(frame))

    def forget(self) -> None:
        """The scale may have changed: an iteration is over."""
        self._shared.forget()
        self.added.forget()
        self.assigned.forget()

    # --- backward -----------------------------------------------------------------------------------------------------

    def before_backward(self, losses: Any, is_scaled: bool) -> None:
        if self.of_weights.is_open:
            self.of_weights.look()
        if is_scaled:
            self._hooks.begin(self._moves.mine())
            self.graph_hooks.begin()
        elif not self._moves.scales:
            self.own_scale.before_backward(losses, self.graph_hooks.are_there)

    def after_backward(
        self, reached: tuple[OptimizerWatch, ...], of_loss: DeviceScale | None, where: Line | None
    ) -> None:
        """Copy what will be compared, and tell hooks that have clipped what carries the scale."""
        self.handed_over.after_backward(reached, of_loss, where)
        self.clips_in_hook = False
        if of_loss is None:
            if not self._moves.scales:
                self.own_scale.after_backward(reached, where)
            return
        scale = float(of_loss)
        changed = [(c.where, c.before, c.after) for c in self.graph_hooks.end() if not c.knows(scale)]
        for watch in reached:
            watch.keep_copy()
        self.assigned.added(reached, of_loss, where)
        for clip in self._hooks.end(scale):
            if isinstance(clip, HookDivision):
                clip.watch.keep_copy(divided=scale)
                clip.watch.divided_at = clip.where
                clip.watch.divides_in_hook = True
                continue
            self._tell_clip(clip, scale)
        clip_of_hidden = clip_of(reached[0], changed) if reached else None
        if clip_of_hidden is not None:
            self._tell_clip(clip_of_hidden, scale, within_graph=True)

    def _tell_clip(self, clip: HookClip, scale: float, within_graph: bool = False) -> None:
        machine, moves = self._moves.machine, self._moves
        self.clips_in_hook = True
        if clip.where is not None and "get_scale" in clip.where.code.co_names:
            return
        if clip.limit >= SMALLEST_LIMIT * scale or machine.stage(clip.watch) is not Stage.SCALED:
            return
        breaches = machine.feed(Read(clip.watch, clip.where, clips=True))
        for breach in breaches:
            breach.facts |= {"by_hand": True, "limit_in_hook": clip.limit, "limit_of": clip.of}
            breach.facts["within_graph"] = within_graph
        moves.second_looks.tell(breaches, clip.watch)

    def arrived(self, watch: OptimizerWatch, scale: float) -> list[tuple[Tensor, Tensor]]:
        """Parameters with hooks of the script's whose gradient has come, in the backward pass that is under way."""
        return self._hooks.arrived(watch, scale)

    # --- divisions ----------------------------------------------------------------------------------------------------

    def before_unscale(self, watch: OptimizerWatch, of: ScalerWatch, frame: Frame) -> None:
        """The scaler is about to divide: what is wrong with these gradients already?"""
        moves = self._moves
        if watch.was_bad:
            self.tell_hidden(watch, of)
        if not watch.cleans and not watch.hidden and moves.looks_closely and not watch.is_untouched():
            compared = watch.compared()
            watch.cleans = compared is not None and compared.is_as_before
        self.settle(watch)
        if of.is_enabled and self.of_weights.unknown(watch):
            made_at = self.of_weights.settle(watch)
            if made_at is not None:
                scale = float(of.current_scale())
                self._tell("unscaled-backward", watch, of, (made_at, frame), scale, {"of_weights": True})
        compared = None
        if moves.looks_closely and of.is_enabled:
            if len(moves.watches.optimizers) > 1:
                self._tell_shared(watch, of, frame)
            self._tell_added(watch, of, frame)
            compared = self._tell_replaced(watch, of)
        stage, ledger = moves.machine.stage(watch), moves.machine.ledger(watch)
        is_ours = isinstance(of.ref(), compat.BorrowedScaler)  # it tells of a division before it divides
        if watch.copy is None or is_ours or stage not in (Stage.SCALED, Stage.UNSCALED):
            watch.copy = None
            return
        compared = compared or watch.compared()
        by, scale = compared.divided_by if compared is not None else None, float(of.current_scale())
        if by is None and moves.scale_was_read and _is_about(watch.shrunk_by(), scale):
            by = scale  # divided, and put together with others (a mean over models)
        watch.copy = None
        if _is_scale(by, scale) and (of.was_asked or watch.divides_in_hook or names_scale(frame)):
            last = ledger.parts[-1].where if ledger.parts else None
            facts: dict[str, Any] = {"by_hand": True, "backward": last, "divided_at": watch.divided_at}
            facts |= {"explicit": moves.stepping is None, "read_at": moves.scale_read_at}
            facts["again_by_hand"] = stage is Stage.UNSCALED
            first = ledger.unscaled_at if stage is Stage.UNSCALED else last
            self._tell("double-unscale", watch, of, (first, frame), scale, facts)

    def _tell_replaced(self, watch: OptimizerWatch, of: ScalerWatch) -> Comparison | None:
        """The script hides an overflow from the scaler (`nan_to_num`), which would have lowered the scale."""
        moves, optimizer = self._moves, watch.ref()
        if optimizer is None or moves.machine.stage(watch) is not Stage.SCALED:
            return None
        compared = watch.compared()
        if compared is not None and compared.was_made_finite:
            moves.recorder.gradients.replaced(optimizer, float(of.current_scale()))
        return compared

    def tell_hidden(self, watch: OptimizerWatch, of: ScalerWatch) -> None:
        """A gradient was not finite behind the backward pass. Is it now that the scaler is about to look?"""
        watch.was_bad, optimizer = False, watch.ref()
        if optimizer is None or not of.is_enabled or self._moves.looks_closely or not watch.is_first_finite():
            return  # (a close look compares it itself)
        watch.hidden += 1
        watch.cleans = watch.hidden < MOST_HIDDEN
        self._moves.recorder.gradients.replaced(optimizer, float(of.current_scale()))

    def note_division(self, watch: OptimizerWatch) -> None:
        """The script may have divided the gradients by the scale itself, before more are added or before its own step."""
        machine = self._moves.machine
        if watch.copy is None or not machine.stage(watch).is_scaled:
            return
        by = watch.divided_by()  # (a write to `.grad.data` is not counted)
        for of in self._moves.watches.scalers if by is not None else ():
            if of.is_enabled and of.uses and _is_scale(by, float(of.current_scale())):
                self._was_divided(watch, of, of.current_scale())
                return

    def still_carries_scale(self, watch: OptimizerWatch) -> bool:
        """Whether the script has multiplied the gradients of a scaled loss by some other number than the scale, which it
        has never asked for: a weight of the loss that is taken out again, a mean over ranks."""
        is_asked = self._moves.scale_was_read or any(of.was_asked for of in self._moves.watches.scalers)
        if is_asked or self._moves.machine.stage(watch) is not Stage.SCALED:
            return False
        worst, by = self._moves.machine.ledger(watch).worst(), watch.divided_by()
        return by is not None and worst is not None and abs(by) * HAND_SCALE < worst.factor

    def is_divided(self, watch: OptimizerWatch) -> bool:
        """Whether the gradients were seen to be divided by the scale before they were clipped."""
        scales = [float(of.current_scale()) for of in self._moves.watches.scalers if of.is_enabled and of.uses]
        return watch.copy is not None and any(_is_scale(watch.divided, scale) for scale in scales)

    def _was_divided(self, watch: OptimizerWatch, of: ScalerWatch, scale: DeviceScale) -> None:
        """The script has divided the gradients of an optimizer itself."""
        self._by_hand[watch] = float(scale)
        self._moves.machine.feed(Divided(watch, of, scale, watch.divided_at))
        watch.divides_by_hand = True
        watch.rest()
        watch.copy = None

    def divides_by_another(self, of: ScalerWatch) -> bool:
        """Whether the script has divided by a scale that is not the scaler's any more, or will not be once the coming iteration
        has updated it. Asked only where nothing waits."""
        now = of.current_scale() if self._by_hand else None
        if now is None or not now.is_at_hand:
            return False
        return compat.grows_next(of.ref()) or any(float(now) != scale for scale in self._by_hand.values())

    def _tell_old_scale(self, watch: OptimizerWatch) -> None:
        """Before an own step: are its gradients divided by the scale that was in force before, which has changed since?"""
        moves, old = self._moves, self._by_hand.get(watch)
        if old is None or watch.copy is None or not moves.machine.stage(watch).is_scaled:
            return
        last = moves.machine.ledger(watch).parts[-1]
        scale = float(last.scale) if last.scale is not None else old
        if _is_scale(watch.divided_by(), old) and abs(scale / old - 1.0) > 1e-2:
            facts: dict[str, Any] = {"scale": scale, "old_scale": old}
            where = script_line(sys._getframe(1))
            moves.second_looks.tell(
                [Breach("bypassed-scaler", watch, None, last.where, where, scale / old, facts)], watch
            )

    def divided(self, watch: OptimizerWatch, where: Line | None) -> None:
        """The scaler has divided the gradients of an optimizer."""
        self._shared.divided(watch, self._moves.mine(), where)

    def _tell_shared(self, watch: OptimizerWatch, of: ScalerWatch, frame: Frame) -> None:
        """Parameters that two optimizers hold are divided for each of them."""
        found = self._shared.again(watch)
        if found is None or self._moves.machine.ledger(watch).session is not Stage.EMPTY:
            return
        scale = float(of.current_scale())
        if scale != 1.0:
            shared, other, first = found
            facts = {"shared_with": other, "parameters": shared, "of": len(watch.parameters())}
            self._tell("double-unscale", watch, of, (first, frame), scale, facts)

    # --- gradient surgery ---------------------------------------------------------------------------------------------

    def taken(self, losses: Any, given: Any, inputs: Any, results: Any, frame: Frame) -> None:
        """`torch.autograd.grad` has returned gradients, maybe of parameters: the script may put them in place itself."""
        moves = self._moves
        scale, _ = moves.carried.scale_of(losses, given)
        if scale is not None:
            moves.carried.taken.note(results, scale)
        if self.assigned.taken(moves.mine(), (inputs, results), scale, script_line(frame)):
            moves.scale_was_read = False
            if moves.routine.is_on:
                moves.routine.leave()

    def settle(self, watch: OptimizerWatch) -> None:
        """The gradients of an optimizer are about to be used: has the script put them in place, and do they carry the scale?"""
        moves, machine = self._moves, self._moves.machine
        stage = machine.stage(watch)
        is_new = stage in (Stage.EMPTY, Stage.USED)
        if is_new:
            self.handed_over.settle(watch)
        if not self.assigned.knows(watch) or not (is_new or (stage is Stage.SCALED and not watch.is_untouched())):
            return
        scalers = [of for of in moves.watches.scalers if of.is_enabled and of.uses]
        found = self.assigned.to(watch, scalers[0].current_scale()) if len(scalers) == 1 else None
        if found is None or (not is_new and _is_scale(watch.divided_by(), float(scalers[0].current_scale()))):
            return  # (a plain division is known without this)
        if not is_new and found.carried and moves.scale_was_read and watch.divided_by() is not None:
            return  # multiplied by one number, by a script that knows the scale: the size does not tell what is in it
        of, scale = scalers[0], found.scale
        if not is_new and not found.carried:  # divided, or clipped by hand to about that size
            watch.divides_by_hand = True
            return
        if is_new:
            machine.feed(Clear(watch))
            machine.feed(Backward((watch,), scale or (of.current_scale() if found.carried else None), found.where))
        if scale is not None and not found.carried:
            self._was_divided(watch, of, scale)
        watch.rest()
        watch.copy = None
        watch.set_by_hand = True
        watch.divides_by_hand = not found.carried
        moves.scale_was_read = False  # whether it was used to divide by is known

    @property
    def settles(self) -> bool:
        """Whether the script may have put gradients in place itself."""
        return True if self.assigned.tasks else self.handed_over.loose is not None

    def settle_all(self) -> None:
        if self.settles:
            for watch in self._moves.mine():
                self.settle(watch)

    # --- gradients of another loss --------------------------------------------------------------------------------------

    def differentiated(self, losses: Any, given: Any, inputs: Any, results: Any, frame: Frame) -> None:
        """`torch.autograd.grad` with respect to parameters that hold gradients already."""
        if self._moves.carried.scale_of(losses, given)[0] is None:
            self.added.taken(inputs, results, script_line(frame))

    def _tell_added(self, watch: OptimizerWatch, of: ScalerWatch, frame: Frame) -> None:
        """Gradients of a loss that was not scaled are part of those which the scaler is about to divide."""
        scale, stage = float(of.current_scale()), self._moves.machine.stage(watch)
        found = self.added.to(watch, scale) if stage is Stage.SCALED else None
        if found is None and stage in (Stage.EMPTY, Stage.USED, Stage.SCALED):
            found = self._part_of_assigned(watch, scale)
        if found is not None:
            times, first = found
            self._tell("unscaled-backward", watch, of, (first, frame), scale, {"added": times})

    def _part_of_assigned(self, watch: OptimizerWatch, scale: float) -> tuple[float, Line | None] | None:
        """The same where the script puts its gradients in place itself. How it combines them may hide it at times."""
        if not self.assigned.are_mixed(watch):
            return None
        self._moves.second_looks.ask(watch)
        first = self._mixed_since.setdefault(watch, self._moves.second_looks.since(watch))
        found = self.assigned.partly_scaled(watch, scale) or self.assigned.put_in_place(watch, scale)
        if found is not None:
            watch.odd = first, self._moves.recorder.steps.count
        return found

    # --- clipping -----------------------------------------------------------------------------------------------------

    def before_clipping(self) -> None:
        """Somebody may have divided them by hand: what clipping does to them then is not to hide it."""
        self.settle_all()
        self._as_left = self._shared.as_left()
        self._at_rest = [watch for watch in self._moves.mine() if watch.at_rest is not None and watch.is_untouched()]
        for watch in self._moves.mine():
            if watch.copy is not None and not watch.is_untouched():
                by = watch.divided_by()
                watch.copy = None
                if by is not None:
                    watch.keep_copy(by)

    def after_clipping(self) -> None:
        """Clipping writes to gradients, which is known."""
        for divided in self._as_left:
            divided.rest()
        for watch in self._at_rest:
            watch.rest()
        self._as_left, self._at_rest = [], []
        for watch in self._moves.mine():
            if watch.copy is not None:
                watch.keep_copy(watch.divided)

    # --- a step without a scaler --------------------------------------------------------------------------------------

    def before_direct_step(self, watch: OptimizerWatch) -> None:
        """An optimizer's own step: were its gradients divided by hand, and only after they were clipped?"""
        self.note_division(watch)
        self._tell_old_scale(watch)
        self.settle(watch)
        self.assigned.forget(watch)
        self._tell_undivided(watch, script_line(sys._getframe(1)))
        clipped = self.own_scale.stepping(watch)
        if clipped is not None:
            facts = {"clips": True, "scale": clipped.scale, "own_scale": True}
            if clipped.made_smaller is not None:
                facts["update_too_small_by"] = min(clipped.made_smaller, clipped.scale)
            breach = Breach("clip-before-unscale", watch, None, clipped.backward, clipped.clip, clipped.scale, facts)
            self._moves.tell([breach], self._moves.recorder.steps.count)

    def _tell_undivided(self, watch: OptimizerWatch, where: Line | None) -> None:
        """An own step with gradients that carry a loss scale of the script's own."""
        moves = self._moves
        found = self.own_scale.undivided(watch, moves.recorder.steps.count)
        if found is None:
            return
        facts: dict[str, Any] = {"scale": found.scale, "own_scale": True, "divided_elsewhere": found.is_beside}
        facts["never_divided"] = found.never_since is not None
        breach = Breach("bypassed-scaler", watch, None, found.backward, where, found.scale, facts)
        if found.never_since is not None:
            moves.tell([breach], found.never_since)
        else:
            moves.second_looks.tell([breach], watch)

    def _tell(
        self,
        cause: str,
        watch: OptimizerWatch,
        of: ScalerWatch,
        places: tuple[Line | None, Frame],
        scale: float,
        facts: dict[str, Any],
    ) -> None:
        first, frame = places
        breach = Breach(cause, watch, of, first, script_line(frame), 1.0 / scale, {"scale": scale, **facts})
        self._moves.second_looks.tell([breach], watch)


def _is_about(by: float | None, scale: float) -> bool:
    return by is not None and scale >= ABOUT**3 and scale / ABOUT <= by <= scale * ABOUT


def _is_scale(by: float | None, scale: float) -> bool:
    return by is not None and scale >= HAND_SCALE and abs(by / scale - 1.0) < 1e-2
