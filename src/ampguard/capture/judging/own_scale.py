"""By which scale of its own does a script multiply its losses before it differentiates them?

`(loss * 2**lg).backward()`, without any GradScaler: what the loss was before that is the vital sign, and a scale that
falls although no optimizer has stepped tells of an update that the script has skipped. A constant that a loss is multiplied
by may mean anything (`100 * mse`). It is a scale where it is a power of two from 256 on, or not the same in every step.
"""

from __future__ import annotations

import math

from torch import Tensor

from ampguard.capture.protocol.loss_scale import SCALING, constant_factors

SMALLEST_FACTOR = 8.0
SMALLEST_POWER = 256.0
SAME = 1e-6
LOWERED = 0.75
"""Of the last scale: what lies below has been lowered, as after an overflow."""
RISEN = 2.0
"""A scale rises by this at most from one iteration to the next."""
POSITIONS = 8
"""Losses of one iteration whose factors are told apart."""


class OwnScale:
    """Follows the factors of a script's losses, backward pass by backward pass. Costs 0.2 us where there is none."""

    def __init__(self) -> None:
        self.present: float | None = None
        """The newest scale; None as long as no loss has carried one."""
        self._at: dict[int, float] = {}
        """The last factor of the first, the second, ... loss of an iteration."""
        self._varies: set[int] = set()
        self._is_small = False
        """Whether it was lowered so far that by its size it might be any factor."""

    def was_lowered(self, factor: float, is_thrown_away: bool = False) -> bool:
        """Whether this factor is the scale that was in use, after it has been lowered.

        `is_thrown_away`: the gradients of the losses before it are gone, and nobody has made a step with them. By that, a
        factor which had not been known for a scale shows itself as one, and so does one that is near 1, or below.
        """
        before = self._at.get(0) if self.present is None and is_thrown_away else self.present
        smallest = 0.0 if is_thrown_away else SMALLEST_FACTOR
        return before is not None and factor > 0.0 and smallest <= factor <= LOWERED * before

    def lowered(self, factor: float) -> None:
        """It is the scale, and was lowered to this."""
        self.present = factor
        self._varies |= {0, *self._at}
        self._is_small = factor < SMALLEST_FACTOR

    def note(self, factor: float, position: int) -> float:
        """The scale that loss number `position` of the running iteration carries; 1 for none."""
        if factor < SMALLEST_FACTOR:
            if self._is_present(factor):
                self.present = factor
                return factor
            return 1.0
        self._is_small = False
        position = min(position, POSITIONS)
        known = self._at.get(position)
        if known is not None and abs(factor / known - 1.0) > SAME:
            self._varies.add(position)
        self._at[position] = factor
        if position not in self._varies and not is_usual_scale(factor):
            return 1.0
        self.present = factor
        return factor

    def _is_present(self, factor: float) -> bool:
        """Whether a small factor is the scale, which is small by now, and may have risen a little since."""
        return (
            self._is_small and self.present is not None and (1 - SAME) * self.present <= factor <= RISEN * self.present
        )

    def of_replayed(self, loss: Tensor) -> float:
        """The scale that a loss carries which is differentiated once more."""
        factor = factor_of(loss)
        if factor < SMALLEST_FACTOR and self._is_present(factor):
            return factor
        is_scale = self.present is not None and factor >= SMALLEST_FACTOR
        return factor if is_scale and (self._varies or is_usual_scale(factor)) else 1.0


def factor_of(loss: Tensor) -> float:
    """The largest constant by which the whole loss was multiplied last; 1 where there is none."""
    node = loss.grad_fn
    if node is None or type(node).__name__ not in SCALING:
        return 1.0
    return max((f for f in constant_factors(loss) if math.isfinite(f)), default=1.0)


def is_usual_scale(factor: float) -> bool:
    """Whether it is a power of two such as loss scales are.

    >>> is_usual_scale(65536.0), is_usual_scale(1000.0), is_usual_scale(4.0)
    (True, False, False)
    """
    return factor >= SMALLEST_POWER and math.frexp(factor)[0] == 0.5
