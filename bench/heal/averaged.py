"""Many runs instead of one: where a loop carries a single rounding far, only means over several runs can be held together.

Float32 and the healed script are run from the same first weights, each time changed by one rounding to float16. What both
carry further by chance averages out; what healing does to the loss stays.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

GOAL = 0.02
AVERAGED = tuple(range(3, 14))
"""Seeds of the weights. Fewer tell a difference of 2 % from chance in hardly any case; each costs two runs."""


class MeanApart(msgspec.Struct, frozen=True):
    """How far the mean of healed runs is from that of float32's, and its standard error, as shares of float32's loss."""

    apart: float
    error: float
    spread: float
    """The standard deviation of float32's own runs."""

    @property
    def is_within_goal(self) -> bool:
        return abs(self.apart) <= GOAL

    def __str__(self) -> str:
        return f"{self.apart:+.1%} ± {self.error:.1%}"


def mean_apart(healed: Sequence[float], in_fp32: Sequence[float]) -> MeanApart | None:
    """Of the distances that both have from one float32 run; None where there are too few of them to say anything."""
    if min(len(healed), len(in_fp32)) < 3:
        return None
    variances = [statistics.variance(runs) / len(runs) for runs in (healed, in_fp32)]
    apart = statistics.fmean(healed) - statistics.fmean(in_fp32)
    return MeanApart(apart, sum(variances) ** 0.5, statistics.stdev(in_fp32))
