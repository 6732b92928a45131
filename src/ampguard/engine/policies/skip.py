"""skip: leave the batch out, say so, and go on."""

from __future__ import annotations

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
            logger.warning("%s: skipped (%d in a row, at %d the run ends)", bad, bad.in_a_row, bad.patience)
            self._tell_of_statistics(amp)

    def _tell_of_statistics(self, amp: Amp) -> None:
        """A skipped step leaves parameters alone; what the forward pass itself has written to stays."""
        poisoned = [name for name in amp.poisoned_buffers() if name not in self._told]
        self._told.update(poisoned)
        if poisoned:
            logger.warning(
                "the forward pass has left NaN or Inf in %s, which every evaluation will use: reset it, or use "
                "on_nonfinite='rollback', which undoes that too",
                ", ".join(f"`{name}`" for name in poisoned[:3]) + (", ..." if len(poisoned) > 3 else ""),
            )
