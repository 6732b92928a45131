"""Layers that were frozen when the optimizers began, or not there, train now, and belong to none of them.

An optimizer that is built from `filter(lambda p: p.requires_grad, ...)` never learns of what is unfrozen later, and none
learns of a layer that is added to its model: backward fills those gradients, and nobody uses or clears them. To leave layers
out without freezing them is no such case: it is the change that says what was meant. It may have come before the first step.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch import Tensor

from ampguard import compat
from ampguard.capture.protocol.built_from import BuiltFrom
from ampguard.capture.protocol.gradients import SMALL, OptimizerWatch
from ampguard.capture.protocol.models import Models
from ampguard.capture.protocol.put_in import PutIn
from ampguard.capture.protocol.watches import Watches
from ampguard.capture.recorder import FlightRecorder
from ampguard.compat import version_of
from ampguard.protocol.events import Breach
from ampguard.protocol.machine import Machine

NEVER = -1
EVERY_32 = 31
EVERY_8 = 7
MAX_FROZEN = 4096
SAMPLE = 8
"""Frozen parameters that are asked after each step."""


class Moves(Protocol):
    """What is known of the loop's calls, as far as it is needed here."""

    recorder: FlightRecorder
    machine: Machine
    watches: Watches
    attempt: int
    told_untrained: set[int]
    put_in: PutIn

    def tell(self, breaches: list[Breach], step: int) -> None: ...


class Unfrozen:
    """Remembers which parameters were frozen and in no optimizer; asks now and then whether that is still so."""

    def __init__(self, moves: Moves, models: Models) -> None:
        self._moves = moves
        self._models = models
        self.built = BuiltFrom()
        self._put_in: set[int] = set()
        """What was not there when the optimizers were built, by identity."""
        self._is_early = False
        """What is looked at was added or unfrozen before the first step."""
        self._frozen: list[weakref.ref[Tensor]] = []
        self._seen: list[tuple[Tensor, int, Tensor | None]] = []
        """What was found to be trained: each with its version, the smallest one with its value."""
        self._seen_by: tuple[OptimizerWatch, int, int] | None = None
        """Whose look that was, after how many of its steps, and in which iteration."""
        self._is_told = False
        self._there: set[int] | None = None
        """All parameters, by identity, when the frozen ones were noted last."""
        self.mask = NEVER
        """An optimizer's step is one to look after where its number has none of these bits."""
        self.sample: list[weakref.ref[Tensor]] = []
        """A few of the frozen ones, which are asked after each step."""

    def after_step(self, watch: OptimizerWatch, may_be_new: bool) -> None:
        """Note what is frozen, in steps that are looked at anyway. `may_be_new`: a layer was made, or has come or gone."""
        steps = watch.steps
        if self.built.is_open:
            self._frozen, self._put_in = self.built.close()
            self._is_early = bool(self._trained())
        if may_be_new and not self._is_told and self._seen_by is None and self._there is not None:
            added = self._added(watch)
            if added:
                self._frozen += [weakref.ref(p) for p in added]
                self._begin(watch, added)
                return
        if not self._is_told and steps & (steps - 1) == 0 and self._seen_by is None:
            self.look(watch)
            if self._seen_by is None:
                self._note_frozen()
        elif not steps & self.mask or (self.sample and self.is_thawed()):
            self.look(watch)

    def is_thawed(self) -> bool:
        """Whether one of those that are asked after each step is frozen no more."""
        for ref in self.sample:  # (at the price of one call)
            p = ref()
            if p is not None and p.requires_grad:
                return True
        return False

    def _note_frozen(self) -> None:
        self._is_early = False
        held = self._held()
        frozen = [p for p in self._models.parameters() if not p.requires_grad and p.is_leaf and id(p) not in held]
        known: dict[int, Tensor] = {id(p): p for p in frozen if p.is_floating_point()}
        self._frozen = [weakref.ref(p) for p in known.values()][:MAX_FROZEN]
        self._there = {id(p) for p in self._models.parameters()}
        self.mask = EVERY_32 if self._frozen else NEVER
        last = len(self._frozen) - 1
        chosen = sorted({round(last * k / (SAMPLE - 1)) for k in range(SAMPLE)}) if self._frozen else []
        self.sample = [self._frozen[n] for n in chosen]

    def _added(self, watch: OptimizerWatch) -> list[Tensor]:
        """What has been added to a model of which the optimizer holds other parameters, and has a gradient."""
        self._models.look()
        held, mine, there = self._held(), {id(p) for p in watch.parameters()}, self._there or set()
        found: dict[int, Tensor] = {}
        for root, _ in self._models.roots():
            inside = compat.all_parameters(root)
            if any(id(p) in mine for p in inside):
                new = [p for p in inside if id(p) not in there and id(p) not in held]
                found |= {id(p): p for p in new if p.requires_grad and p.is_leaf and p.grad is not None}
        return list(found.values())

    def look(self, watch: OptimizerWatch) -> None:
        """Have any of them got gradients, and does nobody use these?"""
        self.sample = [ref for ref in self.sample if (p := ref()) is not None and not p.requires_grad]
        if self._seen_by is None:
            found = self._trained()
            if found:
                self._begin(watch, found)
        elif self._seen_by[0] is watch and watch.steps - self._seen_by[1] >= EVERY_8:
            self._end(watch)

    def _trained(self) -> list[Tensor]:
        alive = [p for ref in self._frozen if (p := ref()) is not None and p.requires_grad and p.is_leaf]
        alive = [p for p in alive if p.grad is not None]  # (an average that became a part of a graph would warn)
        held = self._held() if alive else set()
        return [p for p in alive if id(p) not in held]

    def _begin(self, watch: OptimizerWatch, found: list[Tensor]) -> None:
        smallest = min(found, key=Tensor.numel)
        with compat.unseen():
            value = smallest.detach().clone() if smallest.numel() <= SMALL else None
        self._seen = [(p, version_of(p), value if p is smallest else None) for p in found]
        self._seen_by = (watch, watch.steps, self._moves.attempt)
        self.mask = EVERY_8

    def _end(self, watch: OptimizerWatch) -> None:
        """Several steps later: who has still not been updated, though it has a gradient, is forgotten."""
        assert self._seen_by is not None
        since, seen = self._seen_by[2], self._seen
        self._seen, self._seen_by = [], None
        still = {id(p) for p in self._trained()}
        with compat.unseen():
            left = [p for p, version, value in seen if id(p) in still and version_of(p) == version and _is(p, value)]
        if len(left) != len(seen):  # the script updates them itself, has frozen them again, or has built an optimizer
            self._note_frozen()
            return
        if self._is_early and any(other.is_stale for other in self._moves.watches.optimizers):
            return
        self._is_told, self.mask = True, NEVER
        left = [p for p in left if id(p) not in self._moves.told_untrained]
        if not left:
            return
        ledger = self._moves.machine.ledger(watch)
        facts: dict[str, Any] = {"parameters": left, "unfrozen": True, "of": len(watch.parameters()), "since": since}
        facts["added"] = not any(id(p) in self._there for p in left) if self._there is not None else False
        if facts["added"]:
            facts["put_at"] = self._moves.put_in.line_of(left)
        if self._is_early:
            facts |= {"early": True, "added": all(id(p) in self._put_in for p in left)}
        self._moves.tell(
            [Breach("stale-parameters", watch, None, watch.created, ledger.stepped_at, None, facts)], since
        )

    def _held(self) -> set[int]:
        return {id(p) for watch in self._moves.watches.optimizers for p in watch.parameters()}


def _is(parameter: Tensor, value: Tensor | None) -> bool:
    """Whether it has this value still (a write to `.data` is not counted). Waits for the device."""
    return value is None or bool(parameter.detach().equal(value))


__all__ = ["Unfrozen"]
