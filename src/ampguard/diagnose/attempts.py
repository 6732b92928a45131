"""Replays with something changed: is the step cured?"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.record import BadResult
from ampguard.diagnose.locate.slicing import chain_from
from ampguard.numerics import is_finite
from ampguard.replay.outcome import Outcome
from ampguard.replay.rebuild import Replayer
from ampguard.replay.trace import Trace, bad_elements, traced
from ampguard.replay.variants import Variant

ON_THE_BRINK = 1e19
"""A number whose square float32 does not hold: what is computed from it overflows next."""


FAR_FROM_USUAL = 5e5
"""How many times the largest loss before it a loss may be that is told without a remark."""


def is_of_use(outcome: Outcome, bad: BadResult) -> bool:
    """Whether training can go on with the loss of a replay: one of 1e28 is made of the clamps that led to it."""
    return bad.mode != "train" or outcome.loss is None or abs(outcome.loss) < ON_THE_BRINK


def is_far(loss: float | None, usual: float | None) -> bool:
    """Whether a loss is far from all that were before (`usual`: the largest of them)."""
    return loss is not None and usual is not None and abs(loss) >= FAR_FROM_USUAL * max(usual, 1.0)


def attempt(bad: BadResult, replayer: Replayer, variant: Variant, is_traced: bool = False) -> Outcome:
    """Replay with a variant. The step is cured, too, where all that is left are the -Inf of a mask that the code wrote."""
    outcome = replayer.run(variant, traced=is_traced)
    if not outcome.is_bad or bad.is_of_gradients or bad.kind == "buffer" or outcome.error is not None:
        return outcome
    if not all(_has_no_worse_than_a_mask(tensor) for _, tensor in outcome.targets):
        return outcome
    seen = outcome if is_traced else replayer.run(variant)
    if all(_is_masked_on_purpose(seen.trace, tensor) for _, tensor in seen.targets):
        outcome.is_bad = False
    return outcome


def _has_no_worse_than_a_mask(tensor: Tensor) -> bool:
    """Whether what is not finite is -Inf, and not all there is."""
    values = tensor.detach()
    if is_finite(values):
        return True
    if not compat.is_dense(values) or values.is_complex():
        return False
    return not bool((values.isnan() | (values == torch.inf)).any()) and bool((values > -torch.inf).any())


def _is_masked_on_purpose(trace: Trace, tensor: Tensor) -> bool:
    elements = bad_elements(tensor)
    if elements is None:
        return True
    chain = chain_from(trace, traced(tensor), elements)
    return chain is not None and chain.intended and chain.conversion() is None


def described(outcome: Outcome, bad: BadResult, with_gradients: bool = False) -> str:
    """ "the replayed step is finite; the loss is 2.31"."""
    if outcome.is_bad:
        return "the replayed step is still bad"
    what = "loss" if bad.mode == "train" else "result"  # (in evaluation any number that is read)
    loss = f"; the {what} is {outcome.loss:.4g}" if outcome.loss is not None and math.isfinite(outcome.loss) else ""
    return f"the replayed step is finite{', its gradients too' if with_gradients else ''}{loss}"
