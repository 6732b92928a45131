"""A case: one failure of the run as it is told, and how often it came back."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ampguard.capture.record import BadResult
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.gradients import GradientEvidence
from ampguard.incident import Incident
from ampguard.replay.trace import TracedOp
from ampguard.replay.variants import CodePlace

MOST_NAMED = 3
"""Consequences of a broken protocol that are named."""

Place = tuple[str, str | None, str | None, int | None]
"""Where a failure began: operator, module, file, line."""


@dataclass(slots=True)
class Case:
    """One incident of the run, and how often it came back."""

    incident: Incident
    place: Place
    updates: int = 0
    occurrences: int = 1
    consequences: int = 0
    last_step: int = 0
    steps: set[int] = field(default_factory=set)
    """The steps in which it came back."""
    is_investigated: bool = True
    """False for what needed no replay: it takes none of the investigations that are allowed."""
    calls: frozenset[int] = frozenset()
    """The calls of the model that its last bad result was made from: another result of theirs is no new occurrence."""
    kind: str = ""
    """What was bad: a "loss", a "buffer", ... as `BadResult.kind` has it."""
    is_thrown_away: bool = False
    """Of gradients: whether the script itself cleared them each time, and made no update with them."""
    is_replaced: bool = False
    """Of gradients: it made the update with finite ones in their place."""
    is_of_state: bool = False
    """Whether it spoiled state: what reads that, training or evaluation, may be followed to where it began."""
    part_of: Case | None = None
    """The case of the longer story that this failure belongs to: it is told there."""
    optimizer: weakref.ref[Any] | None = None
    """Whose gradients a broken protocol is about."""
    mended: frozenset[CodePlace] = frozenset()
    """Other places that a fix which was told mends too."""
    led_to: list[str] = field(default_factory=list)
    """Of a broken protocol, or what made the loss scale fall: failures that follow from it, in words."""

    @property
    def is_breach(self) -> bool:
        """Whether it tells of a broken protocol: what follows from that is no other breach."""
        return self.incident.phase == "protocol"

    @property
    def told_as(self) -> Case:
        """This case, or the longer story that it is a part of."""
        return self.part_of or self

    def came_back(self, step: int, occurrences: int = 1) -> None:
        """Count a failure of `step` to it, or (0) only that it was still there."""
        if self.part_of is not None and self.part_of.is_breach:
            self.part_of.consequences += occurrences
            return
        self.told_as.occurrences += occurrences
        self.told_as.last_step = step
        self.told_as.steps.add(step)

    def follows_from(self, breach: Case, what: str | None = None) -> None:
        """It is no incident of its own, but a consequence of a broken protocol (or of what made the loss scale fall)."""
        self.part_of = breach
        breach.consequences += self.occurrences + self.consequences
        if what is not None:
            breach.led_to.append(f"{what} in step {self.last_step}")

    def result(self) -> Incident:
        """The incident as the report tells it."""
        evidence = dict(self.incident.evidence)
        if self.occurrences > 1:
            evidence["last_step"] = self.last_step
        if self.consequences:
            evidence["later_failures_caused_by_it"] = self.consequences
        explanation = self.incident.explanation
        if self.led_to:
            evidence["led_to"] = self.led_to[:MOST_NAMED]
            explanation += f" Failures that follow from it: {', '.join(self.led_to[:MOST_NAMED])}."
        return msgspec.structs.replace(
            self.incident, occurrences=self.occurrences, evidence=evidence, explanation=explanation
        )


def is_thrown_away(bad: BadResult) -> bool:
    """Whether these are gradients that the script itself has cleared or replaced instead of making an update with them."""
    is_withheld = bad.is_held_off or bad.is_replaced
    return bad.kind == "gradient" and is_withheld and bad.loss_scale is None and bad.error is None


def place_of(evidence: Evidence, op: TracedOp | None = None) -> Place:
    """`op`: the operator to blame, where that is another than the evidence's own."""
    is_other, op = op is not None, op or evidence.op
    line = op.line
    file = line.code.co_filename if line is not None else None
    name = op.name
    if op.outputs:  # healed, a line may fail once more, in float32
        name += f" in {op.outputs[0].dtype}"
    if not is_other and isinstance(evidence, GradientEvidence) and evidence.is_only_the_scale:
        name += " at this loss scale"
    return name, op.module, file, line.number if line is not None else None
