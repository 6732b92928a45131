"""skip: leave the batch out, say so, and go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampguard.engine.policies.base import BadStep, Policy, logger

if TYPE_CHECKING:
    from ampguard.engine.amp import Amp


class Skip(Policy):
    """In bfloat16 and float32 too, where PyTorch would poison the weights. A settling loss scale is not worth a word."""

    name = "skip"

    def on_bad_step(self, amp: Amp, bad: BadStep) -> None:
        super().on_bad_step(amp, bad)
        if bad.is_settling:
            logger.info("%s: skipped, the loss scale is halved", bad)
        else:
            logger.warning("%s: skipped (%d in a row, at %d the run ends)", bad, bad.in_a_row, bad.patience)
