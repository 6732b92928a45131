"""Steps that fail in several places: a fix that cures the first is tried together with those that cure the others."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from ampguard.diagnose import words
from ampguard.diagnose.attempts import attempt, described, is_of_use
from ampguard.diagnose.budget import Budget
from ampguard.diagnose.code import accused
from ampguard.diagnose.code.text import merged
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Proposal, find_cause
from ampguard.diagnose.fixes.script_casts import own_casts_of
from ampguard.diagnose.gradients import GradientEvidence, locate_gradient
from ampguard.diagnose.locate.locating import locate
from ampguard.incident import Fix
from ampguard.replay.differentiated import has_finite_gradients, with_backward
from ampguard.replay.rebuild import Replayer
from ampguard.replay.trace import TracedOp
from ampguard.replay.variants import CodePlace, Variant

MAX_FIRSTS = 3
"""Fixes of the first place that another is looked for beside."""

MAX_PLACES = 4
"""Places that one fix changes, at most: a text of more lines is no advice."""


@dataclass(frozen=True, slots=True)
class Joint:
    """A fix of two places, or of the second alone; `of`: how the one of the first was written that is a part of it."""

    fix: Fix
    of: str | None = None


@dataclass(frozen=True, slots=True)
class _Begun:
    """A fix of the first place with changes of others, and what that comes to where it cures the step."""

    fix: Fix
    variant: Variant
    how: str
    places: set[CodePlace]
    effect: str | None = None


def fixes_behind(evidence: Evidence, budget: Budget) -> list[Joint]:
    """Where a fix leaves a loss that is finite and gradients that are not: what makes those finite, alone or beside it.

    The step with that fix is a step with bad gradients; where they begin, and why, is asked as of any other.
    """
    if evidence.replayer is None or not evidence.half_cured:
        return []
    variant, how = evidence.half_cured[0]
    try:
        again = with_backward(evidence.replayer, variant)
        second = locate_gradient(again.bad, again, budget.deadline) if again is not None else None
        found = find_cause(second) if second is not None else None
    except Exception:  # that step cannot be followed: what is known of the fixes stands
        return []
    op = second.forward.op if isinstance(second, GradientEvidence) else evidence.op
    for proposal in found.proposals if found is not None else ():
        if proposal.trial is None or second is None or proposal.action in evidence.losses_with:
            continue
        alone = proposal.trial(second)
        written = words.marked(proposal.how + own_casts_of(evidence, proposal), op, evidence.op)
        for text, change in (
            (written, alone),
            (_both(evidence, op, how, proposal.how, is_first=False), alone.with_base(variant)),
        ):
            effect = _cures(evidence, evidence.replayer, change) if not budget.is_spent else None
            if effect is not None:
                return [Joint(Fix(proposal.action, proposal.target, text, True, effect))]
    return []


def fixes_beside(evidence: Evidence, budget: Budget) -> list[Joint]:
    """Where a fix cures its own place and the step then fails in another one, and in the next: what cures all of them.

    Each fix of the first place is tried with one more place before any is tried with two: the shortest text is told.
    """
    begun = [_Begun(fix, variant, fix.how, {evidence.op.place}) for variant, fix in evidence.still_bad[:MAX_FIRSTS]]
    for _ in range(1, MAX_PLACES):
        for one in list(begun):
            found = None if budget.is_spent else _next_place(evidence, one, budget)
            further = _with_one_more(evidence, *found, one, budget) if found is not None else None
            begun.remove(one)
            if further is None:
                continue
            if further.effect is not None:
                evidence.mended |= further.places - {evidence.op.place}
                cured = msgspec.structs.replace(one.fix, how=further.how, verified=True, outcome=further.effect)
                return [Joint(cured, of=one.fix.how)]
            begun.append(further)
    return []


def _next_place(evidence: Evidence, begun: _Begun, budget: Budget) -> tuple[Evidence, list[Proposal]] | None:
    """Where a step that is changed already fails next, and what is proposed there; None where it is not known."""
    assert evidence.replayer is not None
    try:
        again = copy.copy(evidence.replayer)
        again.base = begun.variant.with_base(evidence.replayer.base)
        second = locate(evidence.bad, again, budget)
        if second is None or second.op.place in begun.places:
            return None
        second.is_of_nothing = begun.fix.action == "guard-empty"
        found = find_cause(second)
    except Exception:  # that step cannot be followed: what is known of the fixes stands
        return None
    return (second, list(with_tighter(found.proposals))) if found is not None else None


def _with_one_more(
    evidence: Evidence, second: Evidence, proposals: list[Proposal], begun: _Begun, budget: Budget
) -> _Begun | None:
    """The step with one more place changed: by what cures it, else by what is proposed first (it may fail in yet another)."""
    assert evidence.replayer is not None
    places = begun.places | {second.op.place}
    further: _Begun | None = None
    for proposal in proposals:
        if proposal.trial is None or budget.is_spent:
            continue
        change = proposal.trial(second).with_base(begun.variant)
        how = _both(evidence, second.op, begun.how, proposal.how)
        effect = _cures(evidence, evidence.replayer, change, may_be_unknown=True)
        if effect is not None or further is None:
            further = _Begun(begun.fix, change, how, places, effect)
        if effect is not None:
            break
    return further


def _both(evidence: Evidence, other: TracedOp, here: str, there: str, is_first: bool = True) -> str:
    """The changes of two places as they are written: as one where both are in one statement."""
    marked = words.marked(there, other, evidence.op)
    together = merged(accused.statement(evidence), here, there) if marked == there else None
    return together or (f"{here}\n{marked}" if is_first else f"{marked}\n{here}")


def with_tighter(proposals: Iterable[Proposal]) -> Iterator[Proposal]:
    """The proposals, each before what is tried where it is not enough."""
    for first in proposals:
        proposal: Proposal | None = first
        while proposal is not None:
            yield proposal
            proposal = proposal.otherwise


def _cures(evidence: Evidence, replayer: Replayer, change: Variant, may_be_unknown: bool = False) -> str | None:
    """What a change comes to that makes the loss and its gradients finite; None for any other.

    `may_be_unknown`: also where nobody can tell of the gradients (in evaluation there are none).
    """
    try:
        outcome = attempt(evidence.bad, replayer, change)
        gradients = has_finite_gradients(replayer, change)
    except Exception:
        return None
    is_cured = (
        not outcome.is_bad
        and is_of_use(outcome, evidence.bad)
        and (gradients or (gradients is None and may_be_unknown))
    )
    return described(outcome, evidence.bad, with_gradients=gradients is True) if is_cured else None
