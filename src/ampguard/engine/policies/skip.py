"""skip: leave the batch out, say so, and go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ampguard.engine.policies.base import BadStep, Policy, logger

if TYPE_CHECKING:
    from ampguard.engine.amp import Amp


class Skip(Policy):
    """In bfloat16 and float32 too, where PyTorch would poison the weights. A settling loss scale is not worth a word."""

    name = "skip"

    def __init__(self) -> None:
        self._told: set[str] = set()

    def on_bad_step(self, amp: Amp, bad: BadStep) -> None:
        super().on_bad_step(amp, bad)
        if bad.is_settling:
            logger.info("%s: skipped, the loss scale is halved", bad)
        else:
            statistics = f"; {_listed(bad.put_back)} hold the values of before again" if bad.put_back else ""
            logger.warning(
                "%s: skipped (%d in a row, at %d the run ends)%s", bad, bad.in_a_row, bad.patience, statistics
            )
            self._tell_of_statistics(amp)

    def _tell_of_statistics(self, amp: Amp) -> None:
        """A forward pass outside `amp.autocast()`, or a large buffer: nobody has kept what it was."""
        poisoned = [name for name in amp.poisoned_buffers() if name not in self._told]
        self._told.update(poisoned)
        if poisoned:
            logger.warning(
                "the forward pass has left NaN or Inf in %s, which every evaluation will use: reset it, or use "
                "on_nonfinite='rollback', which undoes that too",
                _listed(poisoned),
            )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names[:3]) + (", ..." if len(names) > 3 else "")
