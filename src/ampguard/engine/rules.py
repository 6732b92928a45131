"""The order of calls, followed with the same state machine that the guard drives; what breaks it raises."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from ampguard.engine import misuse
from ampguard.engine.holding import Fingerprint, Holding
from ampguard.engine.left_over import LeftOver
from ampguard.engine.misuse import Line
from ampguard.engine.other_backwards import OtherBackwards
from ampguard.protocol.events import Backward, Breach, Clear, Step, Unscale, Update
from ampguard.protocol.machine import Machine
from ampguard.protocol.states import Stage

_alive: weakref.WeakSet[Rules] = weakref.WeakSet()
"""Of each Amp: two of them may have been given one optimizer."""

logger = logging.getLogger("ampguard")


class _CurrentScale:
    """The loss scale of all gradients that are about: when it changes, they are multiplied by as much."""

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read

    def __float__(self) -> float:
        return self._read()


class Rules:
    """Told of every call of an `Amp`. Raises ProtocolError before anything has changed."""

    def __init__(
        self,
        holdings: Sequence[Holding],
        is_scaled: bool,
        window: int,
        read_scale: Callable[[], float],
        left_over: LeftOver,
    ) -> None:
        self._holdings = holdings
        self._left_over = left_over
        self._window = window
        self._is_scaled = is_scaled
        self._machine = Machine()
        self._scale = _CurrentScale(read_scale)
        self._seen: dict[str, Fingerprint] = {}
        """What the gradients were when the last call of ours that changed them had ended."""
        self._backward_at: Line | None = None
        self._backward_for: tuple[str, ...] | None = None
        """The optimizers that the last backward pass was for; None: for all."""
        self._last_losses: list[Tensor] = []
        self.others = OtherBackwards(self._scale.__float__, self.is_held)
        if is_scaled:
            self.others.watch(holdings)
        _alive.add(self)

    def was_copied(self) -> None:
        """With its holdings: their gradients are other tensors now."""
        self._seen = {h.name: h.fingerprint() for h in self._holdings if h.name in self._seen}
        if self._is_scaled:
            self.others.watch_anew(self._holdings)

    def stage(self, holding: Holding) -> Stage:
        return self._machine.stage(holding.name)

    def before_backward(self, only: Sequence[Holding] | None) -> None:
        """Somebody may have cleared gradients, or written to them. `only`: whose will be reached; None: anybody's."""
        for holding in self._holdings:
            self.others.look_again(holding)
            if holding.writes_own and (only is None or holding in only):
                raise misuse.unscaled_too_early(holding.name)
            if self.stage(holding) is Stage.EMPTY and not holding.micro_steps:
                if only is None or holding in only:
                    self._refuse_foreign_gradients(holding)
                continue
            if not holding.has_gradients() and not holding.awaits_average():
                if holding.micro_steps:
                    raise misuse.cleared_in_window(holding.name, holding.micro_steps, self._window)
                self._machine.feed(Clear(holding.name))
                holding.losses = []
        self._before = {h.name: h.fingerprint() for h in self._holdings}

    def _refuse_foreign_gradients(self, holding: Holding) -> None:
        """Those of a backward pass of the loop's own; zeros are none."""
        if not holding.has_gradients() or self._are_carried_on(holding):
            return
        if (
            self._is_scaled
            and self._left_over.is_worth_a_look(f"held {holding.name}")
            and holding.has_nonzero_gradients()
        ):
            if holding.came_with_gradients():
                raise misuse.added_with_gradients(holding.name)
            raise misuse.foreign_gradients(holding.name)
        self._refuse_multiplied(holding)

    def _are_carried_on(self, holding: Holding) -> bool:
        """Whether they carry the scale all the same: `features.backward(gradient)` has brought them. Noted as ours then."""
        if not self.others.carries_on(holding):
            return False
        self._machine.feed(Backward((holding.name,), self._scale))
        self._seen[holding.name] = holding.fingerprint()
        return True

    def _refuse_multiplied(self, holding: Holding) -> None:
        scale = self._left_over.multiplied(holding)
        if scale is not None:
            raise misuse.scaled_by_another(holding.name, scale)
        scales = (rules.scale_carried_by(holding.optimizer) for rules in _alive if rules is not self)
        scale = next((scale for scale in scales if scale is not None), None)
        if scale is not None:
            raise misuse.scaled_by_another_amp(holding.name, scale)

    def scale_carried_by(self, optimizer: Optimizer) -> float | None:
        """The loss scale by which our backward has multiplied the gradients that an optimizer holds now."""
        own = next((h for h in self._holdings if h.optimizer is optimizer), None)
        if own is None or not self.is_held(own) or not own.has_gradients() or self._is_written_to(own):
            return None
        return float(self._scale) if self._is_scaled else None

    def after_backward(self, only: Sequence[Holding] | None, losses: Sequence[Tensor]) -> None:
        """Whose gradients have changed has been reached by the losses. `only`: whose could; None: anybody's."""
        for holding in self._holdings if only is None else only:
            holding.is_new, holding.leaves_out, holding.writes_own = True, False, False
        now = {h.name: h.fingerprint() for h in self._holdings}
        changed = {name for name, seen in now.items() if seen != self._before[name]}
        for holding in self._holdings:
            if holding.name not in changed and holding.learns_others():
                changed.add(holding.name)
                now[holding.name] = holding.fingerprint()
        reached = tuple(
            h.name for h in self._holdings if h.name in changed or (not h.sees_all() and self._may_be_reached(h))
        )
        for holding in self._holdings:
            holding.note_missing(now[holding.name])
            if holding.name in changed or (not holding.sees_all() and holding.has_gradients()):
                holding.losses += losses
        self._last_losses = list(losses)
        self._backward_at = misuse.calling_line()
        self._backward_for = None if only is None else tuple(holding.name for holding in only)
        scale = self._scale if self._is_scaled else None
        self._machine.feed(Backward(reached, scale, self._backward_at))
        self._seen |= {name: now[name] for name in reached}

    def _may_be_reached(self, holding: Holding) -> bool:
        """Gradients among those that are not glanced at."""
        return self.stage(holding) is Stage.EMPTY and holding.has_gradients()

    def losses_of(self, chosen: Sequence[Holding]) -> list[Tensor]:
        """Those whose gradients these hold. Where they were carried on by the loop itself: of the last backward pass."""
        reached = {id(loss): loss for holding in chosen for loss in holding.losses}
        return list(reached.values()) or self._last_losses

    def unscale(self, holding: Holding) -> None:
        """`amp.unscale_`, before it divides. Where there is no gradient yet, the loop is about to write its own."""
        holding.writes_own = self._window == 1 and not holding.is_new and not holding.has_gradients()
        if holding.writes_own:
            return
        self._expect_gradients(holding)
        if not self._is_scaled:
            return
        if self.stage(holding) is Stage.UNSCALED:
            first = self._machine.ledger(holding.name).unscaled_at
            raise misuse.of_breach("double-unscale", holding.name, first)
        self._divide(holding)

    def windows_end(self, chosen: Sequence[Holding]) -> None:
        """`amp.step` of these together ends their windows."""
        for holding in chosen:
            self._expect_gradients(holding)
        if self._window > 1 and len({holding.held for holding in chosen}) > 1:
            raise misuse.unequal_windows({holding.name: holding.held for holding in chosen}, self._window)

    def step(self, holding: Holding) -> None:
        """`amp.step`, before it reads the gradients."""
        if not self._is_scaled:
            if self._is_written_to(holding):
                self._refuse_multiplied(holding)
            return self._raise_first(holding, self._machine.feed(Step(holding.name)))
        if self.stage(holding) is Stage.SCALED:
            self._refuse_divided(holding)
            if self._is_written_to(holding):
                self._refuse_multiplied(holding)
                if not self.others.carries_on(holding):
                    self._tell_of_foreign_writes(holding)
            self._divide(holding)
        breaches = self._machine.feed(Step(holding.name, "amp", misuse.calling_line()))
        return self._raise_first(holding, breaches)

    def evaluated(self, holding: Holding) -> None:
        """A closure has computed gradients, inside the step of an optimizer that asks for them."""
        if self._is_written_to(holding):
            self._refuse_multiplied(holding)

    def in_window(self, holding: Holding) -> None:
        """`amp.step` that only counts, or one that completes the window."""
        if not holding.awaits_average():
            self._expect_gradients(holding)
        if not holding.is_new:
            raise misuse.nothing_to_count(holding.name, holding.micro_steps, self._window)

    def rescaled(self, holding: Holding) -> None:
        """Gradients were written to by us."""
        self._seen[holding.name] = holding.fingerprint()

    def cleared(self, holding: Holding) -> None:
        self._machine.feed(Clear(holding.name))
        self._seen.pop(holding.name, None)
        self.others.forget(holding)

    def updated(self) -> None:
        self._machine.feed(Update("amp"))
        self.others.updated()

    def direct_step(self, holding: Holding) -> None:
        """The optimizer's own step, called by the loop."""
        if not self._is_scaled:
            self._machine.feed(Step(holding.name))
        elif self.stage(holding).is_scaled and holding.has_gradients():
            raise misuse.direct_step(holding.name, float(self._scale), self._backward_at)

    def restored(self, holding: Holding) -> None:
        """Gradients came from a saved state, inside a window."""
        self._machine.feed(Backward((holding.name,), self._scale if self._is_scaled else None))
        self._seen[holding.name] = holding.fingerprint()
        holding.is_new = True  # perhaps it was saved between backward and step

    def is_held(self, holding: Holding) -> bool:
        """Whether it has gradients that carry the loss scale."""
        return self.stage(holding).is_scaled

    def is_unscaled(self, holding: Holding) -> bool:
        """Whether `amp.unscale_` has divided its gradients."""
        return self.stage(holding) is Stage.UNSCALED

    def _expect_gradients(self, holding: Holding) -> None:
        if holding.flat and holding.flat_is_stale():
            raise misuse.stale_flat(holding.name)
        if not holding.has_gradients():
            if holding.awaits_average():
                raise misuse.never_averaged(holding.name, self._backward_at)
            if holding.micro_steps:
                raise misuse.cleared_in_window(holding.name, holding.micro_steps, self._window)
            if self._machine.last_backward is None:
                raise misuse.never_differentiated(holding.name, False)
            if self._backward_for is not None and holding.name not in self._backward_for:
                raise misuse.left_out_of_backward(holding.name, self._backward_for, self._backward_at)
            if not holding.is_new:
                raise misuse.stepped_already(holding.name, self._window)
            raise misuse.not_reached(holding.name, self._backward_at)
        is_unknown = self.stage(holding) in (Stage.EMPTY, Stage.USED) and (self._is_scaled or self._window > 1)
        if is_unknown and holding.writes_own:
            self._machine.feed(Backward((holding.name,), self._scale))
            self._divide(holding)
            return
        if is_unknown and not self._are_carried_on(holding):
            raise misuse.never_differentiated(holding.name, True, self._window)
        plain = self.others.plain_line(holding)
        if plain is not None:
            self._refuse_multiplied(holding)  # not plain then, but a GradScaler's
            raise misuse.plain_backward_beside(holding.name, float(self._scale), plain[0])

    def _is_written_to(self, holding: Holding) -> bool:
        """Whether somebody has changed gradients since the last call of ours that did, or has made them."""
        return self._seen.get(holding.name) != holding.fingerprint()

    def _refuse_divided(self, holding: Holding) -> None:
        scale = self._left_over.divided(holding)
        if scale is not None:
            raise misuse.unscaled_by_another(holding.name, scale, self._backward_at)

    def _tell_of_foreign_writes(self, holding: Holding) -> None:
        if self._left_over.is_worth_a_look(f"written {holding.name}"):
            self.others.watch(self._holdings)
        if holding.foreign_writes_told:
            return
        holding.foreign_writes_told = True
        logger.warning(
            "the gradients of `%s` were changed by something else between amp.backward() and amp.step(), while they "
            "carry the loss scale %g. Where that was clipping, it has clipped too much: use Amp(max_grad_norm=...), or "
            "call amp.unscale_(optimizer) first. Where it was a loss.backward(), its gradients count for nothing: call "
            "amp.backward(loss).",
            holding.name,
            float(self._scale),
        )

    def _divide(self, holding: Holding) -> None:
        self._machine.feed(Unscale(holding.name, "amp", self._scale, misuse.calling_line()))

    def _raise_first(self, holding: Holding, breaches: Sequence[Breach]) -> None:
        for breach in breaches:
            if breach.cause != "missing-zero-grad":
                raise misuse.of_breach(breach.cause, holding.name, breach.first)
