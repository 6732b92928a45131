"""heal: as `skip`, and the guard explains the failure and applies the smallest verified fix to the running model."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from ampguard.engine.policies.skip import Skip

if TYPE_CHECKING:
    from ampguard.engine.amp import Amp

Release = Callable[[BaseException | None], None]
Healing = Callable[[object, Sequence[Optimizer]], Release]
"""Sees to it that a guard runs, and heals, for as long as its first argument lives, which steps these optimizers.

Gives what ends that earlier, and takes the error that has ended the training.
"""

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

    def __init__(self) -> None:
        super().__init__()
        self._release: weakref.WeakKeyDictionary[Amp, Release] = weakref.WeakKeyDictionary()

    def prepare(self, amp: Amp) -> None:
        self._release[amp] = _healing()(amp, list(amp.optimizers.values()))

    def close(self, amp: Amp, error: BaseException | None = None) -> None:
        release = self._release.pop(amp, None)
        if release is not None:
            release(error)


def _healing() -> Healing:
    if not _registered:
        module, _, name = HEALING_OF.partition(":")
        register_healing(getattr(importlib.import_module(module), name))
    return _registered[0]
