"""heal: as `skip`, and the guard explains the failure and applies the smallest verified fix to the running model."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from ampguard.engine.policies.skip import Skip

if TYPE_CHECKING:
    from ampguard.engine.amp import Amp

Healing = Callable[[object, Sequence[Optimizer]], None]
"""Sees to it that a guard runs, and heals, for as long as its first argument lives, which steps these optimizers."""

HEALING_OF = "ampguard.run.healing:heal_for"
"""Where it is found, as an entry point names it. The engine stands below the guard and imports none of it."""

_registered: list[Healing] = []


def register_healing(healing: Healing) -> None:
    """Let another guard than this package's heal."""
    _registered[:] = [healing]


class Heal(Skip):
    """The guard that runs already (`ampguard run`, `ampguard.watch()`) heals; without one, one is started.

    What it heals in time (a bad loss, or output of a model) is no bad step at all.
    """

    name = "heal"

    def prepare(self, amp: Amp) -> None:
        _healing()(amp, list(amp.optimizers.values()))


def _healing() -> Healing:
    if not _registered:
        module, _, name = HEALING_OF.partition(":")
        register_healing(getattr(importlib.import_module(module), name))
    return _registered[0]
