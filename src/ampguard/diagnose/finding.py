"""Finding: what a cause rule answers, and the registry of rules.

A rule is a function from Evidence to a Finding or None. It reads numbers; it never runs the model, prints, or knows
another rule. Several may answer: the one that explains most is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ampguard.capture.record import Line
from ampguard.diagnose.evidence import Evidence
from ampguard.incident import Severity
from ampguard.replay.outcome import Outcome
from ampguard.replay.trace import TracedOp
from ampguard.replay.variants import CodePlace, Variant

Trial = Callable[[Evidence], Variant]


@dataclass(frozen=True, slots=True)
class Proposal:
    """A fix and how to try it. `trial` is None where a replay cannot show it; `search` asks for the smallest region.

    `otherwise` is tried in its place where it was not enough: the same fix, tighter. `known` is what it comes to, where
    that has been seen already. `is_of_autocast`: the text speaks of autocast alone, not of casts that the script makes.
    `standing`: lines of the script that cast to low precision and would go on with it.
    `mends`: other places that fail as the accused one does, and that this change mends with it.
    """

    action: str
    target: str | None
    how: str
    trial: Trial | None = None
    search: bool = False
    otherwise: Proposal | None = None
    known: Outcome | None = None
    is_of_autocast: bool = False
    standing: tuple[Line, ...] = ()
    mends: frozenset[CodePlace] = frozenset()


@dataclass(frozen=True, slots=True)
class Finding:
    """Why the step failed. `weight` says how much the rule explains: a special case outweighs a general one.

    `op` is set where another operator than the evidence's own is to blame.
    """

    cause: str
    explanation: str
    weight: int
    evidence: dict[str, Any] = field(default_factory=dict)
    proposals: tuple[Proposal, ...] = ()
    phase: str | None = None
    line: Line | None = None
    dtype: torch.dtype | None = None
    op: TracedOp | None = None
    severity: Severity = "error"


Rule = Callable[[Any], "Finding | None"]
RULES: dict[str, Rule] = {}
PHASES: dict[str, tuple[str, ...]] = {}
"""For each rule, whether it reads the evidence of a forward pass, of a backward pass, or of both."""


def cause(code: str, phases: tuple[str, ...] = ("forward",)) -> Callable[[Rule], Rule]:
    """Register the rule of a cause under its code."""

    def register(rule: Rule) -> Rule:
        RULES[code] = rule
        PHASES[code] = phases
        return rule

    return register


def find_cause(evidence: Evidence, phase: str | None = None) -> Finding | None:
    """Ask every rule of the phase (default: the evidence's own) and keep the answer that explains most."""
    from ampguard.diagnose import causes

    causes.load()
    phase = phase or evidence.phase
    asked = [rule for code, rule in RULES.items() if phase in PHASES[code]]
    answers = [answer for rule in asked if (answer := rule(evidence)) is not None]
    best = max(answers, key=lambda finding: finding.weight, default=None)
    return replace(best, explanation=best.explanation + evidence.remark) if best is not None else None
