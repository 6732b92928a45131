"""A summed loss whose targets are all left out (`ignore_index`): it is 0, and so is the number of targets to divide it by."""

from __future__ import annotations

from torch import Tensor

from ampguard.diagnose import words
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Proposal
from ampguard.diagnose.locate import lineage

LOSSES = frozenset({"nll_loss_forward", "nll_loss2d_forward", "cross_entropy_loss", "nll_loss"})
TARGET, IGNORE_INDEX = 1, 4
"""Positions in the operators' arguments."""


def all_ignored(evidence: Evidence) -> int | None:
    """How many targets the loss has that is divided, where it leaves out every one of them; else None."""
    maker = lineage.maker(evidence.trace, evidence.op, 0)
    if maker is None or maker.short_name not in LOSSES:
        return None
    call = evidence.capture(maker.index)
    if call is None or len(call.args) <= IGNORE_INDEX:
        return None
    target, ignored = call.args[TARGET], call.args[IGNORE_INDEX]
    if not isinstance(target, Tensor) or not target.numel() or not bool((target == ignored).all()):
        return None
    return target.numel()


def in_words(count: int) -> str:
    """What that means, for the end of an explanation."""
    return (
        f" What it divides is a loss over no target: all {count} are ignored (ignore_index), so there is nothing to learn "
        f"from in this batch."
    )


def leave_out(evidence: Evidence) -> Proposal:
    """The repair that is the data's."""
    how = (
        "leave the batch out, or look why it has no target: `(labels != -100).any()` (a prompt that fills the longest "
        "length leaves none)"
    )
    return Proposal("filter-sample", words.region(evidence), how)
