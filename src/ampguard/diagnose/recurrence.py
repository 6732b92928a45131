"""Is a failure one more of its kind, or the same one, seen at another result?

One bad batch shows in many numbers: in the sum that is differentiated, in each of its terms that the script reads, in
the output and the loss of an evaluation. What they have in common is the call of the model that they were made from.
"""

from __future__ import annotations

from ampguard.capture.record import BadResult, GlueOp, Ref, RootCall, refs_of


def calls_behind(bad: BadResult) -> frozenset[int]:
    """The root calls, by the number of their event, that a bad loss or output was made from; the one that spoilt a buffer."""
    if bad.kind == "buffer":  # it is looked at as the call returns
        return frozenset([e.index for e in bad.record.events if isinstance(e, RootCall)][-1:])
    if bad.kind not in ("loss", "output"):
        return frozenset()
    stack, seen = [t.event for t in bad.targets if isinstance(t, Ref)], set[int]()
    found: set[int] = set()
    while stack:
        index = stack.pop()
        if index in seen:
            continue
        seen.add(index)
        event = bad.record.event(index)
        if isinstance(event, RootCall):
            found.add(index)
        if isinstance(event, (GlueOp, RootCall)):
            stack += [ref.event for ref in refs_of(event)]
    return frozenset(found)
