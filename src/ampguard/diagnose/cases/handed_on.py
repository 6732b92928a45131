"""A call that hands on what it was given (`nn.Flatten`, `nn.Identity`): what is bad in its result was bad before it.

No operator of a replay makes such a value. Where the same evaluation was found to read bad data further on, that is
this failure; else it is told here.
"""

from __future__ import annotations

from ampguard.capture.record import BadResult, RootCall
from ampguard.diagnose.cases.casebook import Casebook
from ampguard.diagnose.cases.sharded import bad_given, input_incident


def tell_handed_on(bad: BadResult, casebook: Casebook, rank: int) -> bool:
    """Whether a bad output, of which no operator was the maker, is told as bad data."""
    events = (bad.record.event(target.event) for target in bad.targets if hasattr(target, "event"))
    root = next((event for event in events if isinstance(event, RootCall)), None)
    found = bad_given(bad, root) if root is not None else None
    if root is None or found is None:
        return False
    for case in casebook.cases:
        told = case.incident
        if told.cause == "nonfinite-input" and (told.step, told.mode) == (bad.step, bad.mode):
            case.came_back(bad.step, 0)
            return True
    handed_on = "The call hands them on as they are."
    casebook.open_unreplayed(input_incident(bad, root, *found, handed_on, rank), bad)
    return True
