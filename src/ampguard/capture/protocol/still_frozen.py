"""Layers that a script means to train, and that stay frozen in the optimizer that holds them.

`module.requires_grad = True` gives the module an attribute and changes no parameter: `requires_grad_()` was meant. And who gives
parameters to an optimizer in the middle of a run wants them to be trained from there on, which none of them is that wants no
gradient. (To hold frozen ones from the beginning is common: they are left alone until somebody unfreezes them.)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.protocol.frozen import is_frozen
from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.models import Models
from ampguard.capture.protocol.script_lines import script_line
from ampguard.capture.record import Line
from ampguard.compat import version_of
from ampguard.protocol.events import Breach

if TYPE_CHECKING:
    from ampguard.capture.protocol.moves import Frame, Moves

ENOUGH_STEPS = 8
"""Of the optimizer since it was given them, or since the attribute was seen: they may be unfrozen a little later."""


@dataclass(slots=True)
class _Meant:
    """Parameters that were frozen when this was first seen."""

    parameters: list[tuple[weakref.ref[Tensor], int]]
    """And how often each had been written to."""
    since_step: int
    """Of the optimizer."""
    iteration: int
    joined_at: Line | None = None
    module: weakref.ref[nn.Module] | None = None
    """The one whose attribute says that they are to be trained."""

    def left(self) -> list[Tensor]:
        return [p for ref, _ in self.parameters if (p := ref()) is not None]

    def are_trained_by_hand(self) -> bool:
        """Whether they were written to since: a script gives its masters their gradients itself."""
        return any((p := ref()) is not None and version_of(p) != version for ref, version in self.parameters)


class StillFrozen:
    """Notes what joins an optimizer frozen; looks for such attributes where an optimizer is looked at closely anyway."""

    def __init__(self, moves: Moves, models: Models) -> None:
        self._moves = moves
        self._models = models
        self._told: set[int] = set()
        """Parameters, by identity."""
        self._meant: weakref.WeakKeyDictionary[OptimizerWatch, list[_Meant]] = weakref.WeakKeyDictionary()

    def joined(self, optimizer: Optimizer, parameters: Iterable[Tensor], frame: Frame) -> None:
        """An optimizer that has stepped is given these."""
        watch, frozen = self._moves.watches.optimizer(optimizer), list(parameters)
        if watch.steps and is_frozen(frozen):
            now = self._moves.recorder.steps.count
            self._meant.setdefault(watch, []).append(_Meant(_noted(frozen), watch.steps, now, script_line(frame)))

    def look(self, watch: OptimizerWatch) -> None:
        """Tell of those that are frozen still, after enough steps."""
        known = self._meant.setdefault(watch, [])
        for module, parameters in self._with_attribute(watch):
            if all(meant.module is None or meant.module() is not module for meant in known):
                known.append(_Meant(_noted(parameters), watch.steps, self._moves.attempt, module=weakref.ref(module)))
        for meant in [meant for meant in known if watch.steps - meant.since_step >= ENOUGH_STEPS]:
            known.remove(meant)
            left, says_so = meant.left(), meant.module is None or _says_so(meant.module())
            is_news = any(id(p) not in self._told for p in left)
            if is_news and says_so and is_frozen(left) and not meant.are_trained_by_hand():
                self._told |= set(map(id, left))
                self._tell(watch, meant, left)

    def _with_attribute(self, watch: OptimizerWatch) -> Iterable[tuple[nn.Module, list[Tensor]]]:
        """Modules of whose frozen parameters the optimizer holds some, and whose attribute says that they train."""
        frozen = {id(p) for p in watch.parameters() if not p.requires_grad}
        if not frozen:
            return
        for module in {
            id(part): part for root, _ in self._models.roots() for part in compat.all_modules(root)
        }.values():
            if _says_so(module):
                own: list[Tensor] = [*compat.all_parameters(module)]
                if is_frozen(own) and any(id(p) in frozen for p in own):
                    yield module, own

    def _tell(self, watch: OptimizerWatch, meant: _Meant, left: list[Tensor]) -> None:
        ledger = self._moves.machine.ledger(watch)
        facts: dict[str, Any] = {
            "parameters": left,
            "of": len(watch.parameters()),
            "steps": watch.steps - meant.since_step,
        }
        facts |= {
            "is_frozen": True,
            "has_attribute": meant.module is not None or any(map(_says_so, self._owners(left))),
        }
        where = meant.joined_at or ledger.stepped_at
        self._moves.tell([Breach("unused-parameters", watch, None, watch.created, where, None, facts)], meant.iteration)

    def _owners(self, parameters: list[Tensor]) -> list[nn.Module]:
        """The modules to which some of these belong, at any depth."""
        ids = set(map(id, parameters))
        parts = (part for root, _ in self._models.roots() for part in compat.all_modules(root))
        return [part for part in parts if any(id(p) in ids for p in compat.all_parameters(part))]


def _noted(parameters: Iterable[Tensor]) -> list[tuple[weakref.ref[Tensor], int]]:
    return [(weakref.ref(p), version_of(p)) for p in parameters]


def _says_so(module: nn.Module | None) -> bool:
    """Whether `module.requires_grad = True` was written: an ordinary attribute, which no parameter hears of."""
    return module is not None and vars(module).get("requires_grad") is True
