"""raise: end the run at the first step that is not finite, unless it is a loss scale that settles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampguard.engine.policies.base import ADVICE, BadStep, Policy
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
            raise NonfiniteError(f"{bad}\n{ADVICE}", bad.parameters or ())
