"""The chain of bad values, from a bad result back to where it begins."""

from __future__ import annotations

from dataclasses import dataclass, field

from ampguard.replay.trace import TracedOp, TracedTensor


@dataclass(slots=True)
class Link:
    """One operator on the chain: which element of which result is bad, and how."""

    op: TracedOp
    result: int
    flat: int | None
    kind: int


@dataclass(slots=True)
class Given:
    """The chain ends at a tensor that no operator of the step made.

    `memory`: the operator, and which of its results, that has made the memory in which the bad value lies, and left it finite.
    """

    tensor: TracedTensor
    flat: int | None
    kind: int
    reader: TracedOp
    operand: int
    memory: tuple[TracedOp, int] | None = None


@dataclass(slots=True)
class Chain:
    """The way back from the bad result: `links[0]` made the result, `links[-1]` is where the chain begins.

    `given` is set where the last link only read a non-finite value that was there before. `intended` is set where the
    chain begins at an infinity that the code meant to have (a literal, a mask that was handed in). `is_data` is set
    where a constant was written into a batch before the model saw it: the batch is what was given.
    """

    links: list[Link] = field(default_factory=list)
    given: Given | None = None
    intended: bool = False
    is_data: bool = False

    @property
    def head(self) -> Link:
        return self.links[-1]

    def conversion(self) -> Link | None:
        """Where an intended infinity became something else (NaN, or an infinity of the other sign)."""
        kind = self.given.kind if self.given is not None else self.links[-1].kind
        for link in reversed(self.links):
            if link.kind != kind and not (link.op.short_name == "neg" and link is not self.links[0]):
                return link
            kind = link.kind
        return None
