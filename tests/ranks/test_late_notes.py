"""A note of the first rank that comes while another rank looks for it is waited for, not missed."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from ampguard.incident import Incident
from ampguard.run.ranks import _Pair
from ampguard.run.ranks_exchange import Check, Exchange, Sums


class ComesInBetween(Exchange):
    """The first rank's note of a step comes right after the first look for it."""

    has_come = False

    def check_of(self, number: int) -> Check | None:
        found = super().check_of(number)
        if not self.has_come:
            self.has_come = True
            self.write(Check(number, number, "theirs", []), Sums(["weight"], [1]))
        return found


def test_note_that_comes_in_between(tmp_path: Path) -> None:
    told: list[Incident] = []
    pair = _Pair(ComesInBetween(tmp_path, 0, 0), 1, 0, deque(), told.append)
    pair._waiting.append((Check(0, 0, "mine", []), Sums(["weight"], [2]), None, None))
    pair.compare()
    pair.compare()
    assert [(incident.cause, incident.step) for incident in told] == [("rank-divergence", 0)]
