"""A scaler that was needed and is not any more: from some step on the forward passes run in bfloat16, and it scales on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ampguard import compat
from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.models import Models
from ampguard.capture.protocol.watches import ScalerWatch
from ampguard.capture.record import RootCall
from ampguard.protocol.events import Breach

if TYPE_CHECKING:
    from ampguard.capture.protocol.moves import Moves

FIRST_STEPS = 8
REGIONS = 8
"""Regions of autocast in a row, none of them of float16, after which it is suspected."""


@dataclass(slots=True)
class _Idle:
    watch: OptimizerWatch
    since: int
    steps: int
    """The scaler's, when it was first seen idle."""
    regions: int = 0


class IdleScalers:
    """Looks in a few iterations what the models were called in; counts regions of autocast once that was bfloat16 alone."""

    def __init__(self, moves: Moves, models: Models) -> None:
        self._moves = moves
        self._models = models
        self.suspected: dict[ScalerWatch, _Idle] = {}
        """As long as there are any, regions of autocast are counted."""
        self._was_needed: set[ScalerWatch] = set()

    def look(self, of: ScalerWatch, watch: OptimizerWatch) -> None:
        """The scaler has stepped, in an iteration that is looked at."""
        kinds = self._kinds()
        if "float16" in kinds:
            self._was_needed.add(of)
            self._withdraw(of)
        elif kinds == {"bfloat16"} and of in self._was_needed and of not in self.suspected and of.steps > FIRST_STEPS:
            self.suspected[of] = _Idle(watch, self._moves.attempt, of.steps)

    def entered(self, kind: str) -> None:
        """A region of autocast begins, with gradients on."""
        for of, idle in list(self.suspected.items()):
            idle.regions += 1
            if kind == "float16":
                self._withdraw(of)
            elif idle.regions == REGIONS:
                facts: dict[str, Any] = {
                    "idle": True,
                    "dtype": kind,
                    "scale": float(of.current_scale()),
                    "since": idle.since,
                }
                breach = Breach("needless-scaler", idle.watch, of, of.made_or_used_at, of.made_or_used_at, None, facts)
                self._moves.listener.on_suspicion(("idle", of), breach, idle.since)

    def _withdraw(self, of: ScalerWatch) -> None:
        if self.suspected.pop(of, None) is not None:
            self._moves.listener.on_suspicion(("idle", of), None, 0)

    def _kinds(self) -> set[str]:
        """The types of autocast that modules were called under in this step, with gradients; float16 of their own counts."""
        roots = [e for e in self._models.record().events if type(e) is RootCall and e.modes.grad]
        last = [root for root in roots if root.updates_before == roots[-1].updates_before]
        found = {str(dtype).removeprefix("torch.") for r in last for _, enabled, dtype in r.modes.autocast if enabled}
        if "float16" not in found and any(
            p.dtype is torch.float16 for root in last for p in compat.all_parameters(root.module)
        ):
            found.add("float16")
        return found
