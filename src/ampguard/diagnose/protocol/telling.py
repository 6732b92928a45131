"""What a rule answers to a breach, and the registry of these rules.

A rule reads the scene and answers; it never touches a tensor or knows another rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ampguard.capture.record import Line
from ampguard.diagnose.protocol.scene import MAX_NAMES, Scene
from ampguard.incident import Fix, Incident, Location, Phase, Severity


@dataclass(frozen=True, slots=True)
class Telling:
    """Why the protocol is broken here and what to do. `line` is the place that has to change."""

    explanation: str
    line: Line | None
    fixes: tuple[Fix, ...]
    severity: Severity = "error"
    evidence: dict[str, Any] = field(default_factory=dict)
    module: str | None = None
    dtype: str | None = None
    phase: Phase = "protocol"
    op: str | None = None
    """The operator, where numbers of an optimizer's own arithmetic broke."""


BreachRule = Callable[[Scene], Telling | None]
"""None where a second look shows that nothing is broken."""

BREACH_RULES: dict[str, BreachRule] = {}


def breach(code: str) -> Callable[[BreachRule], BreachRule]:
    """Register the rule of a cause under its code."""

    def register(rule: BreachRule) -> BreachRule:
        BREACH_RULES[code] = rule
        return rule

    return register


def order(scene: Scene, how: str, action: str = "call-order", target: str | None = None) -> Fix:
    """A fix that a replay cannot show."""
    return Fix(action, target if target is not None else scene.optimizer, how)


def incident_of(scene: Scene, told: Telling, step: int, rank: int) -> Incident:
    """The incident: the same facts in words and for programs."""
    evidence: dict[str, Any] = {
        "optimizer": scene.optimizer if scene.breach.optimizer is not None else None,
        "first": _place(scene.first),
        "again": _place(scene.again),
        "factor": scene.breach.factor,
        "parameters": scene.parameters[:MAX_NAMES] or None,
        "parameter_count": len(scene.parameters) or None,
        "not_in_step": scene.facts.get("not_in_step"),
        **told.evidence,
    }
    return Incident(
        step=step,
        rank=rank,
        mode="train",
        phase=told.phase,
        severity=told.severity,
        cause=scene.breach.cause,
        module=told.module,
        op=told.op,
        dtype=told.dtype,
        location=_location(told.line),
        explanation=told.explanation + _began_later_than(scene.facts.get("not_in_step"), step),
        evidence={key: value for key, value in evidence.items() if value is not None},
        fixes=told.fixes,
    )


def _began_later_than(before: int | None, step: int) -> str:
    """What is seen in some iterations only may have begun before the one in which it was seen."""
    if before is None or step - before <= 1:
        return ""
    return f" It was not so yet in step {before}, the last before this one that was looked at as closely."


def _location(line: Line | None) -> Location | None:
    return line.location() if line is not None else None


def _place(line: Line | None) -> dict[str, Any] | None:
    if line is None:
        return None
    place = line.location()
    return {"file": place.file, "line": place.line, "code": place.code}
