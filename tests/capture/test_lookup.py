"""Events are looked up by their number in long steps, in which some were forgotten."""

from __future__ import annotations

from typing import Any, cast

import pytest

from ampguard.capture.record import StepRecord


class Numbered:
    """An event that counts how often it is asked for its number."""

    asked = 0

    def __init__(self, index: int) -> None:
        self._index = index

    @property
    def index(self) -> int:
        Numbered.asked += 1
        return self._index


@pytest.mark.parametrize("wanted", [3, 4, 500, 2000, 2999, 3001, 9000])
def test_event_with_gaps_before_it_is_found_without_a_search_through_all(wanted: int) -> None:
    events = [Numbered(index) for index in range(3, 3000, 2)]
    record = StepRecord()
    record.events = cast("list[Any]", events)
    Numbered.asked = 0

    found = record.event(wanted)

    assert Numbered.asked < 30
    assert found is next((event for event in events if event._index == wanted), None)
