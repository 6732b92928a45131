"""The smallest part of compiled code that is bad as compiled while everything around it runs eagerly.

To compile a stretch takes seconds, whatever its length. So the likeliest operator is tried first: the first whose
results are bad compiled and finite eagerly, where all results are kept. What that does not find is found by bisection.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ampguard import compat
from ampguard.replay.compiled import InParts, Part
from ampguard.replay.outcome import Outcome
from ampguard.replay.rebuild import Replayer
from ampguard.replay.variants import Variant

MAX_REPLAYS = 40
MOST_SECONDS = 60.0
"""The longest search in compiled code, unless a step takes very long."""
SHARE = 2 / 3
"""Of the time that is allowed: the search may take so much, and trying the fixes the rest."""


@dataclass(slots=True)
class Search:
    """Replays with some parts of the step's graphs compiled, as long as there is time for them.

    `allowed` seconds from `begin` on, of which the search may take its share.
    """

    replayer: Replayer
    bench: InParts
    began: float = math.inf
    allowed: float = math.inf
    replays: int = 0
    refusals: int = 0
    """Parts that could not be compiled by themselves, or not run."""
    seconds: float = 0.0
    """What the search took."""

    def begin(self, allowed: float) -> None:
        self.began, self.allowed = time.perf_counter(), allowed

    @property
    def end(self) -> float:
        """When trying the fixes has to end, too."""
        return self.began + self.allowed

    @property
    def is_over(self) -> bool:
        return time.perf_counter() > self.began + SHARE * self.allowed or self.replays >= MAX_REPLAYS

    def outcome(self, parts: tuple[Part, ...]) -> Outcome | None:
        """The step with these parts compiled; None where they cannot be."""
        self.replays += 1
        self.bench.parts = parts
        try:
            return self.replayer.run(Variant(compiled=self.bench), traced=False)
        except Exception as error:
            if "second time" in str(error) and not self.bench.retains_graph:
                self.bench.retains_graph = True
                return self.outcome(parts)
            self.refusals += 1
            return None

    def is_bad(self, *parts: Part) -> bool:
        outcome = self.outcome(parts)
        return outcome is not None and outcome.is_bad

    def wholes(self) -> list[Part]:
        """Every graph of the step, whole."""
        return [Part(i, 0, len(graph.nodes)) for i, graph in enumerate(self.bench.calls) if graph.nodes]


def allowed_seconds(left: float) -> float:
    """How long compiled code may be searched: what is left for the investigation, or as long as the script has compiled.

    Whoever waited for that can wait as long again, once; other ranks would give up.
    """
    if compat.several_ranks():
        return left
    return max(left, min(compat.compilation_seconds(), MOST_SECONDS))


def guilty_part(search: Search) -> tuple[Part, bool] | None:
    """The smallest part that is enough to make the step bad, and whether it could be made no smaller; None: no part is."""
    try:
        likeliest = likeliest_part(search)
        if likeliest is not None and search.is_bad(likeliest):
            return likeliest, True
        whole = guilty_graph(search)
        return smallest_part(search, whole) if whole is not None else None
    finally:
        search.seconds = time.perf_counter() - search.began


def likeliest_part(search: Search) -> Part | None:
    """The first operator with a result that is not finite compiled and finite eagerly, where every result is kept.

    What a backward pass computes is kept nowhere.
    """
    wholes = search.wholes()
    if search.replayer.bad.is_of_gradients or not wholes:
        return None
    search.bench.keeps_all = True
    try:
        if not search.is_bad(*wholes):
            return None
        pieces = list(search.bench.pieces)
    finally:
        search.bench.keeps_all = False
    for seen in pieces:
        graph = search.bench.calls[seen.call]
        for node, compiled, eager in zip(seen.nodes, seen.outputs, seen.eagerly(), strict=True):
            if is_spoilt(compiled, eager) and isinstance(node, fx.Node):
                return Part(seen.call, *graph.around(node))
    return None


def is_spoilt(compiled: Any, eager: Any) -> bool:
    """Whether a result has an element that is not finite compiled and finite eagerly."""
    if not isinstance(compiled, Tensor) or not isinstance(eager, Tensor) or compiled.shape != eager.shape:
        return False
    return compiled.is_floating_point() and bool((~torch.isfinite(compiled) & torch.isfinite(eager)).any())


def guilty_graph(search: Search) -> Part | None:
    """The first graph that is enough to make the step bad; None where none is, alone, or time is up."""
    wholes = search.wholes()
    if not wholes or not search.is_bad(*wholes):
        return None
    low, high = 0, len(wholes)
    while high - low > 1 and not search.is_over:
        middle = (low + high) // 2
        low, high = (low, middle) if search.is_bad(*wholes[:middle]) else (middle, high)
    found = wholes[high - 1]
    return found if high - low == 1 and (len(wholes) == 1 or search.is_bad(found)) else None


def smallest_part(search: Search, whole: Part) -> tuple[Part, bool]:
    """The smallest stretch of nodes that is bad compiled by itself, and whether it could be made no smaller.

    First the end is brought forward, then the beginning back; every stretch that is returned was seen to be bad.
    """
    graph = search.bench.calls[whole.call]
    cuts = graph.cuts
    low, high = 0, len(cuts) - 1
    while high - low > 1 and not search.is_over:
        middle = (low + high) // 2
        low, high = (low, middle) if search.is_bad(Part(whole.call, 0, cuts[middle])) else (middle, high)
    if high - low > 1:
        return Part(whole.call, 0, cuts[high]), False
    begin, end = 0, high
    if high > 1 and search.is_bad(Part(whole.call, cuts[high - 1], cuts[high])):
        begin = high - 1  # as a rule it is one operator, so this is tried even when time is up
    while end - begin > 1 and not search.is_over:
        middle = (begin + end) // 2
        begin, end = (middle, end) if search.is_bad(Part(whole.call, cuts[middle], cuts[high])) else (begin, middle)
    return Part(whole.call, cuts[begin], cuts[high]), end - begin == 1
