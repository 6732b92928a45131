"""A bad value that the script computed before its first step and that is gone by then, and what is left of it fails.

Class weights of `1 / count` where a class has no samples: Inf, which the sum of the weights takes on, so that each weight
divided by it is 0. The step is given finite numbers, and their loss is 0/0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import Tensor

from ampguard.capture.record import BadResult, GlueOp
from ampguard.diagnose import words
from ampguard.diagnose.attempts import attempt
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Finding, Trial, find_cause
from ampguard.diagnose.givens.made_before import MadeBefore, explained_before
from ampguard.diagnose.gradients import GradientEvidence
from ampguard.errors import ReplayError
from ampguard.replay.trace import TracedOp, TracedTensor

GONE = "What it was given was computed before the first step from a value that was not finite"
MAX_OPERATORS = 64
"""Operators behind the accused one whose operands are looked at."""


def with_what_vanished(evidence: Evidence, finding: Finding) -> Finding:
    """The finding, with the line before training that is to blame, where a repair of it is seen to cure the step."""
    if evidence.given is not None or evidence.replayer is None or isinstance(evidence, GradientEvidence):
        return finding
    for given in _given_to(evidence):
        made = _made(evidence, given)
        proposals = made.proposals("", given, id(given)) if made is not None else ()
        if made is None or not proposals or not _cures(evidence, proposals[0].trial):
            continue
        named = tuple(dataclasses.replace(p, target=_name(made)) for p in proposals)
        return dataclasses.replace(
            finding,
            explanation=finding.explanation + made.in_words(GONE),
            evidence={**finding.evidence, "made_before": made.as_dict()},
            proposals=(*named, *finding.proposals),
        )
    return finding


def _given_to(evidence: Evidence) -> Iterator[Tensor]:
    """Tensors that no operator of the step made, behind the accused one, nearest first."""
    waiting: list[TracedOp] = [evidence.op]
    seen: set[int] = set()
    while waiting and len(seen) < MAX_OPERATORS:
        op = waiting.pop(0)
        if op.index in seen:
            continue
        seen.add(op.index)
        for operand in op.inputs:
            if operand.made_by is not None:
                waiting.append(evidence.trace.ops[operand.made_by[0]])
            elif (given := _as_given(evidence, operand)) is not None:
                yield given


def _as_given(evidence: Evidence, operand: TracedTensor) -> Tensor | None:
    stand_in = evidence.outcome.stand_ins.get(operand.storage)
    if stand_in is not None:
        return stand_in[1]
    return operand.live() if operand.live is not None else None


def _made(evidence: Evidence, given: Tensor) -> MadeBefore | None:
    """The calls that made a finite tensor before training from a value that was not, where they can be run again."""
    assert evidence.replayer is not None
    found = evidence.replayer.before_training.vanished_behind(given)
    if found is None:
        return None
    record, ref, behind = found
    event = record.event(behind.event)
    if not isinstance(event, GlueOp):
        return None
    explained = explained_before(evidence, record, behind)
    finding = find_cause(explained) if explained is not None and explained.given is None else None
    if finding is None:
        return None
    try:
        result = evidence.replayer.beside(BadResult("output", "train", evidence.bad.step, record, (ref,)))
    except ReplayError:  # not all of it was kept, or its operands were overwritten since
        return None
    return MadeBefore(explained, finding, event, None, result)


def _cures(evidence: Evidence, trial: Trial | None) -> bool:
    if trial is None or evidence.replayer is None:
        return False
    try:
        return not attempt(evidence.bad, evidence.replayer, trial(evidence)).is_bad
    except Exception:  # what it was made from was overwritten since
        return False


def _name(made: MadeBefore) -> str | None:
    return words.place_of(made.location) if made.location is not None else None
