"""Bad losses and gradients that the script itself steers round: it skips the batch, and the training goes on.

The cause is the same, and so is the fix. But it is nothing that stopped the run: a batch was lost. Not so where it has
poisoned a running statistic, and a later failure is due to that: then it is what broke the run.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable

import msgspec
from torch import Tensor

from ampguard.capture.sampling.vitals import StepVitals
from ampguard.diagnose.cases.case import Case
from ampguard.incident import Incident
from ampguard.numerics import is_finite

RARE = 0.1
"""Of the steps: what is skipped more often is no training any more."""
STEPS_AFTER = 3
"""Steps with a finite loss after the last bad one, at least."""
MOST_SPOILED = 4096
PHASES = ("data", "forward", "loss", "backward")


class SkippedByScript:
    """Follows which steps were made with a bad loss, to tell at the end which bad losses no update was made with."""

    def __init__(self, given_up: Container[int] = ()) -> None:
        self._given_up = given_up
        """Steps that the script has made no update in, because of numbers that were not finite."""
        self.somebody_else_does = False
        """Whether the guard itself, or an engine, holds off bad steps or makes them again."""
        self._spoiled: set[int] = set()
        """Steps whose update was made with a bad loss, or skipped by a scaler."""
        self._finite_since: int | None = None
        self._last = -1

    def ended(self, vitals: StepVitals) -> None:
        """An iteration is over."""
        self._last = vitals.step
        if vitals.step in self._given_up:
            return
        is_bad = vitals.loss is not None and not math.isfinite(vitals.loss)
        if (is_bad or vitals.skipped) and len(self._spoiled) < MOST_SPOILED:
            self._spoiled.add(vitals.step)
        if is_bad or vitals.loss is None:
            self._finite_since = None
        elif self._finite_since is None:
            self._finite_since = vitals.step

    def settle(self, cases: Iterable[Case], weights: Iterable[Tensor]) -> None:
        """The run is over: tell those that the script has steered round as what they were."""
        if self.somebody_else_does:
            return
        cases = list(cases)
        blamed = {(by["step"], by["cause"]) for case in cases if (by := case.incident.evidence.get("poisoned_by"))}
        found = [
            case
            for case in cases
            if (case.incident.step, case.incident.cause) not in blamed and self._is_steered_round(case)
        ]
        if found and all(is_finite(weight.detach()) for weight in weights):
            for case in found:
                case.incident = self._told(case)

    def _is_steered_round(self, case: Case) -> bool:
        incident, since = case.incident, self._finite_since
        if (
            not (case.kind == "loss" or case.is_thrown_away)
            or incident.mode != "train"
            or incident.severity != "error"
            or case.consequences
            or case.part_of is not None
        ):
            return False
        if incident.phase not in PHASES or incident.cause == "divergence" or since is None:
            return False
        bad = _steps_of(case)
        goes_on = self._last - max(*bad, since - 1) >= (1 if case.is_replaced else STEPS_AFTER)
        is_rare = case.occurrences <= max(1.0, RARE * self._last)
        return goes_on and is_rare and len(self._spoiled) < MOST_SPOILED and not bad & self._spoiled

    def _told(self, case: Case) -> Incident:
        lost = "a batch was" if case.occurrences == 1 else f"{case.occurrences} batches were"
        it = "these gradients" if case.is_thrown_away else "it"
        went_on = f"The script made no update with {it} ({lost} lost) and went on"
        if case.is_replaced:
            went_on = f"The training went on ({lost} lost)"
        text = (
            f" {went_on}: in the {self._last - max(_steps_of(case))} steps since, all losses are finite, and so are the "
            f"weights."
        )
        evidence = {**case.incident.evidence, "skipped_by_script": True}
        return msgspec.structs.replace(
            case.incident, severity="warning", explanation=case.incident.explanation + text, evidence=evidence
        )


def _steps_of(case: Case) -> set[int]:
    return case.steps | {case.incident.step}
