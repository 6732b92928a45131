"""The machine: takes events in the order in which they happen, answers with the breaches they are.

It knows what each optimizer's gradients are made of (`ledger`), which move may follow which (`states`), and what a
scaler remembers between two updates. A wrong division is a breach only once an optimizer has stepped with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, SupportsFloat

from ampguard.protocol.events import (
    Backward,
    Breach,
    Clear,
    Divided,
    Event,
    Key,
    Place,
    Read,
    Refused,
    Rescale,
    Step,
    Unscale,
    Update,
)
from ampguard.protocol.ledger import Ledger, Session, scaler_of
from ampguard.protocol.refusals import Refusals
from ampguard.protocol.states import BREACHES, MOVES, Move, Stage

CLEARED_STEPS = 8
"""Steps from the first one on, none of them with gradients, because these were cleared behind each backward pass."""

PILED_STEPS = 3
"""Steps in a row on top of old gradients, after which nobody can have meant it."""

PILED_NOW_AND_THEN = 8
"""Such steps of a run that need not come in a row."""


class Machine:
    """One per process; keys of different scalers and optimizers live side by side."""

    def __init__(self) -> None:
        self._ledgers: dict[Key, Ledger] = {}
        self._sessions: dict[Key, Session] = {}
        self.bypassed: list[Breach] = []
        """Steps past a scaler since its last update."""
        self.open = 0
        """Optimizers that hold gradients of a scaled loss with which they have not stepped."""
        self.scaled = 0
        """Those among them whose gradients are still scaled."""
        self.last_backward: Backward | None = None
        self._handlers: dict[type, Callable[[Any], Sequence[Breach]]] = {
            Backward: self._backward,
            Unscale: self._unscale,
            Divided: self._divided,
            Rescale: self._rescale,
            Read: self._read,
            Step: self._step,
            Update: self._update,
            Clear: self._clear,
            Refused: Refusals(self).breaches,
        }

    def feed(self, event: Event) -> Sequence[Breach]:
        """What this event breaks, if anything."""
        return self._handlers[type(event)](event)

    def ledger(self, optimizer: Key) -> Ledger:
        """What is known of an optimizer's gradients."""
        found = self._ledgers.get(optimizer)
        if found is None:
            found = self._ledgers[optimizer] = Ledger()
        return found

    def stage(self, optimizer: Key) -> Stage:
        """What an optimizer's gradients are now."""
        found = self._ledgers.get(optimizer)
        return found.stage if found is not None else Stage.EMPTY

    def is_at_rest(self, but_for: Collection[Key] = ()) -> bool:
        """Whether nobody holds gradients of a scaled loss that have not been used (`but_for` these), or that pile up."""
        ledgers = self._ledgers
        if any(ledger.piled_up for ledger in ledgers.values()):
            return False
        return not self.open or self.open == sum(ledgers[key].stage.is_open for key in but_for if key in ledgers)

    def scaled_by(self, optimizer: Key, scale: SupportsFloat) -> None:
        """What an optimizer holds of a scaled loss, and nobody has divided, carries this scale."""
        for part in self.ledger(optimizer).parts:
            if part.scale is not None and not part.divided_by:
                part.scale = scale

    def forget(self, key: Key) -> None:
        """An optimizer or a scaler is gone."""
        ledger = self._ledgers.get(key)
        if ledger is not None:
            self._enter(ledger, Stage.EMPTY)
            del self._ledgers[key]
        self._sessions.pop(key, None)

    def clear(self, optimizer: Key) -> bool:
        """A `Clear` without a place, for gradients that nobody is waiting for. False where somebody is."""
        ledger = self._ledgers.get(optimizer)
        if ledger is None or ledger.stage is Stage.EMPTY:
            return True
        if ledger.stage is not Stage.USED:
            return False
        ledger.clear(None)
        ledger.stage = Stage.EMPTY
        return True

    def _enter(self, ledger: Ledger, stage: Stage) -> None:
        old = ledger.stage
        if old is not stage:
            self.open += stage.is_open - old.is_open
            self.scaled += stage.is_scaled - old.is_scaled
            ledger.stage = stage

    def session(self, scaler: Key) -> Session:
        """What is known of a scaler."""
        found = self._sessions.get(scaler)
        if found is None:
            found = self._sessions[scaler] = Session()
        return found

    # --- moves ------------------------------------------------------------------------------------------------------

    def _backward(self, event: Backward) -> Sequence[Breach]:
        self.last_backward = event
        for optimizer in event.reached:
            ledger = self.ledger(optimizer)
            ledger.backwards_since_unscale += 1
            ledger.backwards_since_step += 1
            ledger.add(event.scale, event.where)
            self._enter(ledger, _after_backward(ledger.stage, event.scale is not None))
            if event.also_plain:
                ledger.add(None, event.where)
                self._enter(ledger, _after_backward(ledger.stage, False))
        return ()

    def _unscale(self, event: Unscale) -> Sequence[Breach]:
        ledger = self.ledger(event.optimizer)
        session = self.session(event.scaler)
        session.touched.append(event.optimizer)
        move = (ledger.stage, Move.UNSCALE)
        if move in BREACHES:
            cause, stage = BREACHES[move]
            self._suspect(ledger, cause, event, session)
        else:
            stage = MOVES.get(move, ledger.stage)
            ledger.divide(event.scale)
            self._compare_scales(ledger, event, session)
        self._enter(ledger, stage)
        ledger.session = Stage.UNSCALED
        self._was_divided(ledger, event.where, by_hand=False)
        return ()

    def _divided(self, event: Divided) -> Sequence[Breach]:
        ledger = self.ledger(event.optimizer)
        by_hand = Unscale(event.optimizer, event.scaler, event.scale, event.where)
        found = BREACHES.get((ledger.stage, Move.UNSCALE))
        if found is not None:
            self._suspect(ledger, found[0], by_hand, self.session(event.scaler))
        else:
            ledger.divide(event.scale)
            self._compare_scales(ledger, by_hand, self.session(event.scaler))
            if ledger.pending is not None:
                ledger.pending.facts["by_hand"] = True
        self._enter(ledger, found[1] if found is not None else MOVES.get((ledger.stage, Move.UNSCALE), ledger.stage))
        self._was_divided(ledger, event.where, by_hand=True)
        return ()

    @staticmethod
    def _was_divided(ledger: Ledger, where: Place, by_hand: bool) -> None:
        ledger.unscaled_at = where
        ledger.by_hand = by_hand
        ledger.backwards_since_unscale = 0

    def _rescale(self, event: Rescale) -> Sequence[Breach]:
        ledger = self.ledger(event.optimizer)
        stage = MOVES[ledger.stage, Move.RESCALE]
        if stage is not ledger.stage:
            ledger.multiply(event.scale)
            self._enter(ledger, stage)
        ledger.pending = None
        ledger.session = Stage.EMPTY
        return ()

    def _suspect(self, ledger: Ledger, cause: str, event: Unscale, session: Session) -> None:
        """A division that is wrong, once somebody steps with it."""
        first = ledger.unscaled_at
        if cause == "unscaled-backward":
            first = next((part.where for part in ledger.parts if part.scale is None), None)
        by_another = cause == "double-unscale" and any(key != event.optimizer for key in session.stepped)
        ledger.divide(event.scale)
        facts = {"twice": True, "updated_between": session.updated_at} if by_another else {}
        if ledger.by_hand and not by_another:
            facts |= {"by_hand": True, "divided_at": first}
        elif event.inside_step and ledger.session is Stage.UNSCALED:
            facts |= {"through_wrapper": True}
        self._pend(ledger, "missing-update" if by_another else cause, event, first, facts)

    def _compare_scales(self, ledger: Ledger, event: Unscale, session: Session) -> None:
        """Gradients scaled by one scale and divided by another."""
        if ledger.stage is Stage.USED:
            return  # left over from a step, divided once more: no backward pass has come since
        if all(part.scale is event.scale for part in ledger.parts):
            return
        if all(part.is_right for part in ledger.parts):
            return
        if any(getattr(part.scale, "is_squared", False) for part in ledger.parts):
            self._pend(ledger, "bypassed-scaler", event, ledger.parts[-1].where, {"scaled_twice": True})
            return
        scales = {float(part.scale) for part in ledger.parts if part.scale is not None}
        facts = {"scales": sorted(scales), "divided_by": float(event.scale), "updated_between": session.updated_at}
        other = next((key for part in ledger.parts if (key := scaler_of(part.scale)) not in (None, event.scaler)), None)
        if other is not None:
            of_other = [part for part in ledger.parts if scaler_of(part.scale) is other]
            facts["scales"] = sorted({float(part.scale) for part in of_other if part.scale is not None})
            own = [part.where for part in ledger.parts if scaler_of(part.scale) is event.scaler]
            if own and of_other[0].where in own:  # one line scales both: a new scaler has come within the window
                facts |= {"scaler_replaced": True, "scales": sorted(scales)}
                self._pend(ledger, "accumulation-broken", event, of_other[0].where, facts)
                return
            facts |= {"scaled_by_another": True, "other": other, "is_mixed": len(of_other) < len(ledger.parts)}
            self._pend(ledger, "unscaled-backward", event, of_other[0].where, facts)
            return
        if session.loaded_at is not None:
            facts |= {"loaded": True, "updated_between": session.loaded_at}
        cause = "accumulation-broken" if len(scales) > 1 or session.loaded_at is not None else "missing-update"
        # Who has stepped before the last update and again since it does so in each micro-step.
        facts["others"] = [key for key in set(session.stepped) - {event.optimizer} if session.stepped.count(key) > 1]
        first = ledger.parts[0].where if cause == "accumulation-broken" else session.updated_at
        self._pend(ledger, cause, event, first, facts)

    def _pend(self, ledger: Ledger, cause: str, event: Unscale, first: Place, facts: dict[str, Any]) -> None:
        worst = ledger.worst()
        if worst is None or worst.is_right:
            return
        facts = {**facts, "scale": float(event.scale), "backward": worst.where}
        ledger.pending = Breach(cause, event.optimizer, event.scaler, first, event.where, worst.factor, facts)

    def _read(self, event: Read) -> Sequence[Breach]:
        ledger = self.ledger(event.optimizer)
        found = BREACHES.get((ledger.stage, Move.CLIP))
        if found is None or ledger.stage is Stage.REOPENED:
            return ()  # the step with what was unscaled too early tells all of it
        worst = ledger.worst()
        if worst is None or worst.is_right:
            return ()  # a loss scale of 1
        facts = {"clips": event.clips, "scale": worst.factor}
        return (Breach(found[0], event.optimizer, None, worst.where, event.where, worst.factor, facts),)

    def _step(self, event: Step) -> Sequence[Breach]:
        ledger = self.ledger(event.optimizer)
        breaches: list[Breach] = []
        if event.scaler is None:
            breaches += self._direct_step(ledger, event)
        else:
            breaches += self._step_of_scaler(ledger, event, self.session(event.scaler))
        old = ledger.leftover_from
        last = ledger.parts[-1].where if ledger.parts else None
        if ledger.parts and ledger.stage is not Stage.USED:
            ledger.use(event.where)
            self._enter(ledger, Stage.USED)
            ledger.idle_steps = ledger.empty_steps = 0
        else:
            ledger.steps += 1
            ledger.stepped_at = event.where
            ledger.idle_steps += ledger.stage is Stage.USED
            ledger.empty_steps += ledger.stage is Stage.EMPTY
            breaches += self._always_cleared(ledger, event)
            if ledger.idle_steps == PILED_STEPS and event.scaler is not None:
                facts = {"steps": ledger.idle_steps, "has_scaler": True, "is_reused": True}
                breaches.append(
                    Breach("missing-zero-grad", event.optimizer, event.scaler, last, event.where, None, facts)
                )
        if ledger.piled_up >= PILED_STEPS or (ledger.piled_up and ledger.piled_in_all >= PILED_NOW_AND_THEN):
            facts = {"steps": ledger.piled_up, "in_all": ledger.piled_in_all, "has_scaler": event.scaler is not None}
            breaches.append(
                Breach("missing-zero-grad", event.optimizer, event.scaler, old or last, event.where, None, facts)
            )
        return breaches

    @staticmethod
    def _always_cleared(ledger: Ledger, event: Step) -> list[Breach]:
        """A step without gradients: were they cleared behind each backward pass so far, and before its step?"""
        if ledger.cleared_part is None:
            return []
        ledger.cleared_steps += 1
        if not ledger.cleared_steps == ledger.steps == CLEARED_STEPS:
            return []
        facts = {"why": "cleared", "backward": ledger.cleared_part.where, "steps": CLEARED_STEPS, "zeros": True}
        return [Breach("no-gradients", event.optimizer, event.scaler, ledger.cleared_at, event.where, None, facts)]

    def _step_of_scaler(self, ledger: Ledger, event: Step, session: Session) -> list[Breach]:
        assert event.scaler is not None
        if event.unscales_with is not None and (event.was_divided or ledger.session is Stage.EMPTY):
            self._unscale(Unscale(event.optimizer, event.scaler, event.unscales_with, event.where, True))
        session.stepped.append(event.optimizer)
        ledger.by_scaler = not event.skipped
        ledger.session = Stage.USED
        breach, ledger.pending = ledger.pending, None
        if breach is None:
            found = BREACHES.get((ledger.stage, Move.STEP))
            if found is None:
                return []
            breach = self._step_breach(ledger, event, found[0])
        return [] if event.skipped or breach is None or breach.cause == ledger.refused else [breach]

    def _step_breach(self, ledger: Ledger, event: Step, cause: str) -> Breach | None:
        """The scaler steps with gradients that it has not unscaled."""
        worst = ledger.worst()
        if worst is None or worst.is_right:
            return None
        if event.by_closure:
            facts: dict[str, Any] = {"by_closure": True, "scale": worst.factor}
            return Breach(
                "bypassed-scaler", event.optimizer, event.scaler, worst.where, event.where, worst.factor, facts
            )
        facts = {"not_unscaled": True, "backward": worst.where, "scale": worst.factor}
        return Breach(cause, event.optimizer, event.scaler, ledger.unscaled_at, event.where, worst.factor, facts)

    def _direct_step(self, ledger: Ledger, event: Step) -> list[Breach]:
        pending, ledger.pending = ledger.pending, None
        if ledger.stage is Stage.USED:
            return self._step_again(ledger, event)
        if not event.is_untouched:
            return []
        if ledger.stage is Stage.UNSCALED and pending is not None:
            pending.again = pending.again or event.where  # (where the script itself has divided may not be known)
            return [pending]
        if ledger.stage is Stage.UNSCALED and event.found_inf:
            facts: dict[str, Any] = {"found_inf": True}
            breach = Breach("bypassed-scaler", event.optimizer, None, ledger.unscaled_at, event.where, None, facts)
            return [breach]
        found = BREACHES.get((ledger.stage, Move.DIRECT_STEP))
        worst = ledger.worst()
        if found is None or worst is None or worst.is_right:
            return []
        facts = {"scale": worst.factor, "updated_before": self._updated_since_backward()}
        breach = Breach(found[0], event.optimizer, None, worst.where, event.where, worst.factor, facts)
        self.bypassed.append(breach)
        return [breach]

    def _updated_since_backward(self) -> Place:
        """Where a scaler was updated behind the last backward pass."""
        last = self.last_backward
        return next(
            (s.updated_at for s in self._sessions.values() if last is not None and s.last_backward is last), None
        )

    @staticmethod
    def _step_again(ledger: Ledger, event: Step) -> list[Breach]:
        """The script steps with gradients with which the scaler has stepped, or for which it has skipped its step."""
        facts: dict[str, Any] = {"found_inf": True, "was_skipped": True}
        if not event.found_inf:
            ledger.repeated += ledger.by_scaler and event.is_untouched
            if ledger.repeated < PILED_STEPS or not event.is_untouched:
                return []
            facts = {"repeats": ledger.repeated}
        return [Breach("bypassed-scaler", event.optimizer, None, ledger.stepped_at, event.where, None, facts)]

    def _update(self, event: Update) -> Sequence[Breach]:
        session = self.session(event.scaler)
        for optimizer in session.touched + session.stepped:
            if (ledger := self._ledgers.get(optimizer)) is not None:
                ledger.session = Stage.EMPTY
        session.touched = []
        session.stepped = session.stepped[-1:]  # who made the script update
        session.updated_at, session.loaded_at = event.where, None
        session.updates += 1
        session.last_backward = self.last_backward
        self.bypassed.clear()
        return ()

    def _clear(self, event: Clear) -> Sequence[Breach]:
        if event.optimizer in self._ledgers:
            ledger = self._ledgers[event.optimizer]
            ledger.clear(event.where)
            self._enter(ledger, Stage.EMPTY)
        return ()


def _after_backward(stage: Stage, is_scaled: bool) -> Stage:
    return MOVES[stage, Move.BACKWARD_SCALED if is_scaled else Move.BACKWARD_PLAIN]
