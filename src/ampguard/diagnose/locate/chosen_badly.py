"""The evidence of a bad value that no operator hands on, and for which something was chosen; see `choices.py`."""

from __future__ import annotations

from ampguard.diagnose import words
from ampguard.diagnose.evidence import Evidence
from ampguard.replay.trace import TracedOp


class ChosenBadly(Evidence):
    @property
    def remark(self) -> str:
        assert self.chain.choice is not None
        by, shown = (words.name(op) + _at(op) for op in self.chain.choice)
        return f" It reaches the result through a choice: {by} picks by its place, and what it picked fails in {shown}."


def _at(op: TracedOp) -> str:
    return f" at {words.place_of(op.line.location())}" if op.line is not None else ""
