"""A bad value that no operator hands on, and for which something was chosen that fails further on; see `choices.py`.

It is to blame where the operator that fails does not, once the choice is made among what is finite.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from ampguard.diagnose import words
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.locate.chain import Chain
from ampguard.diagnose.locate.choices import bad_choices, chosen_before, looks_for_smallest
from ampguard.diagnose.locate.slicing import chain_to
from ampguard.replay.trace import TracedOp
from ampguard.replay.variants import Intervention, RunKey, Variant


class ChosenBadly(Evidence):
    """The evidence of such a value."""

    choice: tuple[TracedOp, TracedOp]
    """Who chose, and what made the first bad value of what was chosen."""

    @property
    def remark(self) -> str:
        by, shown = (words.name(op) + _at(op) for op in self.choice)
        return f" It reaches the result through a choice: {by} picks by its place, and what it picked fails in {shown}."


def choice_behind(evidence: Evidence) -> Evidence | None:
    """The value for whose place the accused operator was given what it fails on; None where there is none."""
    head = evidence.op
    if evidence.replayer is None or evidence.given is not None or evidence.intended or head.in_backward:
        return None
    found = chosen_before(evidence.trace, head)
    if found is None:
        return None
    by, place = found
    chain = chain_to(evidence.trace, *place)
    if chain.intended or not _is_to_blame(evidence):
        return None
    links = [*evidence.chain.links, *chain.links]
    chosen = ChosenBadly(evidence.bad, Chain(links, chain.given), evidence.outcome, evidence.replayer)
    chosen.choice = (by, head)
    return chosen


def _is_to_blame(evidence: Evidence) -> bool:
    assert evidence.replayer is not None
    choosing: dict[RunKey, Intervention] = {
        evidence.trace.run_key(op.index): functools.partial(
            _among_finite, math.inf if looks_for_smallest(op) else -math.inf
        )
        for op in bad_choices(evidence.trace)
    }
    try:
        replayed = evidence.replayer.run(Variant(interventions=choosing))
    except RuntimeError:
        return False
    head = replayed.trace.aligned(evidence.op)
    return head is not None and not head.is_bad


def _among_finite(worst: float, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values, *rest = args
    return func(values.where(values.isfinite(), worst), *rest, **kwargs)


def _at(op: TracedOp) -> str:
    return f" at {words.place_of(op.line.location())}" if op.line is not None else ""
