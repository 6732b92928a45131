"""What PyTorch refuses: the same assertion has several causes, and what went before tells which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ampguard.protocol.events import Backward, Breach, Key, Place, Refused
from ampguard.protocol.ledger import Ledger, Session, scaler_of
from ampguard.protocol.states import Stage

Answer = tuple["str | None", Place, "dict[str, Any]"]
"""A cause (None where it is no breach), the place of what brought it about, facts."""


class Known(Protocol):
    """What went before, as the machine knows it."""

    last_backward: Backward | None
    bypassed: list[Breach]

    def ledger(self, optimizer: Key) -> Ledger: ...
    def session(self, scaler: Key) -> Session: ...


class Refusals:
    """One method for each reason that PyTorch gives."""

    def __init__(self, known: Known) -> None:
        self._known = known

    def breaches(self, event: Refused) -> Sequence[Breach]:
        """The breach that made PyTorch raise, if it was one."""
        ledger = self._known.ledger(event.optimizer) if event.optimizer is not None else Ledger()
        cause, first, facts = getattr(self, f"_{event.reason.replace('-', '_')}")(event, ledger)
        if cause is None:
            return ()
        ledger.refused = cause
        facts = {"refused": event.call, "reason": event.reason, **facts}
        optimizer = facts.pop("optimizer", event.optimizer)
        return (Breach(cause, optimizer, event.scaler, first, event.where, None, facts),)

    def _never_scaled(self, event: Refused, ledger: Ledger) -> Answer:
        part = ledger.parts[-1] if ledger.parts else None
        last = self._known.last_backward
        where = part.where if part is not None else last.where if last is not None else None
        other = scaler_of(part.scale) if part is not None else None
        by_another = part is not None and part.scale is not None
        facts = {"scaled_by_another": by_another, "other": other, "no_backward": where is None and last is None}
        return "unscaled-backward", where, facts

    def _unscaled_before(self, event: Refused, ledger: Ledger) -> Answer:
        first = ledger.unscaled_at
        facts = {"first_found_inf": event.found_inf}
        if ledger.backwards_since_unscale == 0:
            return "double-unscale", first, facts
        last = ledger.parts[-1].where if ledger.parts else None
        if event.weights_moved and ledger.stage is not Stage.REOPENED:
            return "double-unscale", first, {**facts, "second_pass": True, "backward": last}
        is_window = ledger.backwards_per_step != 1 or event.window is not None
        if event.found_inf:  # then a script may leave the iteration; not where the window that it divides by goes on
            is_window = ledger.backwards_since_unscale < (event.window or 0)
        if ledger.stage is not Stage.REOPENED or not is_window:
            kept = ledger.stage is Stage.REOPENED and not event.found_inf
            return "missing-update", first, {**facts, "next_iteration": True, "was_kept": kept}
        return "accumulation-broken", first, {**facts, "backwards": ledger.backwards_since_unscale}

    def _unscaled_after_step(self, event: Refused, ledger: Ledger) -> Answer:
        if ledger.backwards_since_step:
            return "missing-update", ledger.stepped_at, {"next_iteration": True}
        return "double-unscale", ledger.stepped_at, {"after_step": True}

    def _stepped_before(self, event: Refused, ledger: Ledger) -> Answer:
        return "missing-update", ledger.stepped_at, {"next_iteration": bool(ledger.backwards_since_step)}

    def _no_checks_for_optimizer(self, event: Refused, ledger: Ledger) -> Answer:
        last = self._known.last_backward
        if ledger.cleared_part is not None:
            return "no-gradients", ledger.cleared_at, {"why": "cleared", "backward": ledger.cleared_part.where}
        if last is None:
            return "no-gradients", None, {"why": "no-backward"}
        if ledger.parts:
            return None, None, {}  # it has gradients: a scaler of the script's own asks for no checks
        return "no-gradients", last.where, {"why": "not-reached", "reached": tuple(last.reached)}

    def _no_checks_before_update(self, event: Refused, ledger: Ledger) -> Answer:
        session = self._known.session(event.scaler)
        if self._known.bypassed:
            known = self._known.bypassed[-1]
            return None, None, {"optimizer": known.optimizer}
        stepped = session.touched + session.stepped[bool(session.updates) :]
        if stepped:
            of_it = self._known.ledger(stepped[-1])
            cause, first, facts = self._no_checks_for_optimizer(event, of_it)
            return cause, first, {**facts, "optimizer": stepped[-1]}
        last = self._known.last_backward
        return (
            "missing-update",
            session.updated_at or (last.where if last is not None else None),
            {
                "without_step": True,
                "repeated": session.updates > 0,
                "is_second": session.updates > 0 and session.last_backward is last,
            },
        )

    def _half_gradients(self, event: Refused, ledger: Ledger) -> Answer:
        return "fp16-parameters", None, {}

    def _closure(self, event: Refused, ledger: Ledger) -> Answer:
        return "bypassed-scaler", ledger.parts[-1].where if ledger.parts else None, {"closure_refused": True}
