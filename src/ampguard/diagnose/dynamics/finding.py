"""The registry of rules over many steps.

A rule is a function from Situation to an Incident or None. It reads what was measured; it never prints, changes the
training, or knows another rule. `asked` says when: after a step, after a look at the weights, after sampled
activations, when a failure was explained (the rule may say that it ends a longer story), when the run ends.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor
from torch.optim import Optimizer

from ampguard.capture.record import Line
from ampguard.capture.sampling.hand_updates import HandUpdate
from ampguard.diagnose.dynamics.remedies import Remedies
from ampguard.diagnose.dynamics.trajectory import Trajectory
from ampguard.incident import Incident
from ampguard.replay.stretch import StretchReplay

Moment = Literal["step", "look", "peaks", "failure", "end"]


@dataclass(slots=True)
class Situation:
    """What a rule is given: the course of the run, and the failure that was just explained, where there is one."""

    trajectory: Trajectory
    step: int
    rank: int = 0
    failure: Incident | None = None
    """The failure that was just explained, where a rule is asked about one."""
    known: Incident | None = None
    """What was told of the steps that the scaler is skipping, where something was."""
    optimizers: list[Optimizer] = field(default_factory=list)
    lines: dict[int, Line] = field(default_factory=dict)
    """Where each optimizer is stepped, by its identity."""
    name_of: Callable[[Tensor], str | None] = lambda parameter: None
    """A parameter's dotted name, None where it hangs in no module that was called."""
    by_hand: HandUpdate | None = None
    """The last update that was looked at, where the script makes them by itself."""
    running: list[tuple[int, float]] = field(default_factory=list)
    """The running iteration with each finite loss that it has differentiated so far."""
    whose: Optimizer | None = None
    """Of several optimizers the one whose losses `trajectory` holds: it is told as that which diverged."""
    rests_on_others: bool = False
    """Whether the number that failed was computed from the weights of other optimizers alone."""
    stretch: StretchReplay | None = None
    """The steps up to the failure, where they were kept."""
    remedies: dict[bool, Remedies] = field(default_factory=dict)
    """What was tried on them already: also where the failing step fails on the weights of before (True), or not."""


Rule = Callable[[Situation], "Incident | None"]
RULES: dict[str, tuple[frozenset[Moment], Rule]] = {}


def cause(code: str, asked: Iterable[Moment]) -> Callable[[Rule], Rule]:
    """Register the rule of a cause under its code, and when it is asked."""

    def register(rule: Rule) -> Rule:
        RULES[code] = (frozenset(asked), rule)
        return rule

    return register


def ask(moment: Moment, situation: Situation, told: Container[str] = ()) -> Iterable[Incident]:
    """What the rules that are asked at this moment answer; those whose cause was `told` already are not asked."""
    from ampguard.diagnose import dynamics

    dynamics.load()
    asked = [rule for code, (moments, rule) in RULES.items() if moment in moments and code not in told]
    return [answer for rule in asked if (answer := rule(situation)) is not None]
