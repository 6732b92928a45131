"""raise: end the run at the first step that is not finite, unless it is a loss scale that settles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampguard.engine.policies.base import BadStep, Policy, advice
from ampguard.errors import NonfiniteError

if TYPE_CHECKING:
    from ampguard.engine.amp import Amp


class Raise(Policy):
    """Parameters and optimizer state are those before the step."""

    name = "raise"
    waits = True

    def on_bad_step(self, amp: Amp, bad: BadStep) -> None:
        super().on_bad_step(amp, bad)
        if not bad.is_settling:
            why = "an operation of the backward pass overflows, or is taken where it has no derivative"
            if not bad.loss_is_finite:
                why = "the batch or the weights hold NaN or Inf, or an operation of the forward pass makes them"
            raise NonfiniteError(f"{bad}\n{advice(why, amp.mode.scales_loss)}", bad.parameters or ())
