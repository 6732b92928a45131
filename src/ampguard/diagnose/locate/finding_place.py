"""Where a failure begins, by every way there is of running its step again: with the present weights, without hooks that refuse
to run twice, with what the script's own update made of weights, with what was not recorded computed again."""

from __future__ import annotations

import contextlib
import dataclasses
import time

from ampguard import compat
from ampguard.capture.record import BadResult, Held
from ampguard.capture.recorder import FlightRecorder
from ampguard.diagnose.budget import Budget
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.givens.computed_again import with_what_made_it
from ampguard.diagnose.locate.locating import locate
from ampguard.errors import ChangedSinceError, ReplayError
from ampguard.replay.behind import has_bad_leaves
from ampguard.replay.forgiving import calls_hooks
from ampguard.replay.rebuild import Replayer
from ampguard.replay.rewritten import with_rewritten_weights

STATEMENTS = 4
"""Statements, each of which uses what the one before it made, that are computed again."""


class FindingPlace:
    """Finds the places of one recorder's failures."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self._whole: BadResult | None = None
        """A bad result with what was not recorded of it computed again."""

    def was_computed_again(self, evidence: Evidence) -> bool:
        """Whether the evidence rests on what was computed again from the script's variables."""
        return evidence.bad is self._whole

    def of(self, bad: BadResult, least_seconds: float) -> Evidence | None:
        """Where the failure begins; with the present values where the old ones are gone, if it fails with those too."""
        budget = Budget.for_step(self._recorder.step_seconds, time.perf_counter(), least_seconds)
        rewritten = with_rewritten_weights(bad, self._recorder)
        if rewritten is not None:
            with contextlib.suppress(ReplayError):
                evidence = locate(rewritten, Replayer(rewritten, self._recorder), budget)
                if (
                    evidence is not None and evidence.given is None
                ):  # else the weights were given bad values, not made bad
                    return evidence
        try:
            evidence = locate(bad, Replayer(bad, self._recorder), budget)
            behind = self._behind_an_update(evidence, bad, budget) or self._computed_again(evidence, bad, budget)
            return behind or evidence
        except ChangedSinceError as changed:
            if bad.graph is not None:  # looked at late: what it has spoilt by now would be taken for what spoilt it
                raise
            self._recorder.log.arguments.copies_large = True
            try:
                evidence = locate(bad, Replayer(bad, self._recorder, as_it_is_now=True))
            except ReplayError:
                raise changed from None
            if evidence is not None and _is_given_what_was_written_since(evidence):
                raise
            return evidence
        except ReplayError:
            evidence = self._before_any_record(bad, budget)
            if evidence is None:
                raise
            return evidence
        except Exception:  # perhaps a hook of the script's that refuses to run twice for one step
            if not calls_hooks(bad):
                raise
            return locate(bad, Replayer(bad, self._recorder, forgives_hooks=True), budget)

    def _before_any_record(self, bad: BadResult, budget: Budget) -> Evidence | None:
        """Where the first step of a script failed that calls no module and has made no optimizer yet: nothing told that it
        had begun, and what it computed was looked at as what comes before training."""
        target = bad.targets[0] if bad.targets and not bad.record.events else None
        found = self._recorder.before_training.maker_of(target.tensor) if isinstance(target, Held) else None
        if found is None:
            return None
        record, ref = found
        first = dataclasses.replace(bad, record=record, targets=(ref,))
        with contextlib.suppress(Exception):  # something was not kept: it is as good as it was without
            return locate(first, Replayer(first, self._recorder), budget)
        return None

    def _behind_an_update(self, evidence: Evidence | None, bad: BadResult, budget: Budget) -> Evidence | None:
        """Where plain weights were bad before the step: what in the script's own update made them so, if that was recorded."""
        if evidence is None or evidence.given is None or bad.kind != "loss" or not has_bad_leaves(bad.record):
            return None
        with contextlib.suppress(ReplayError):
            found = locate(bad, Replayer(bad, self._recorder, remakes_weights=True), budget)
            return found if found is not None and found.given is None else None
        return None

    def _computed_again(self, evidence: Evidence | None, bad: BadResult, budget: Budget) -> Evidence | None:
        """Where a given tensor was bad, and something of the step was passed over: what in the script's code made it so."""
        if self._recorder.passed_over != bad.step:
            return None
        found, whole = evidence, bad
        with contextlib.suppress(Exception):  # it is as good as it was without
            for _ in range(STATEMENTS):
                longer = with_what_made_it(whole, found) if found is not None and found.given is not None else None
                if longer is None:
                    return None
                self._whole = whole = longer
                found = locate(whole, Replayer(whole, self._recorder), budget)
                if found is not None and found.given is None:
                    return found
        return None


def _is_given_what_was_written_since(evidence: Evidence) -> bool:
    """Whether the failure begins in a tensor that has been written to since the step read it (a model that adds to its input
    in place): what was bad then is not known."""
    given = evidence.given_tensor
    key = compat.storage_key(given) if given is not None and not given.requires_grad else 0
    return bool(key) and any(
        not held.is_intact and compat.storage_key(held.tensor) == key for _, _, held in evidence.held()
    )
