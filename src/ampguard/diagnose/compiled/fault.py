"""Evidence that compiled code is at fault: the step is bad as it was compiled, and finite when it runs eagerly."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from ampguard import compat, numerics
from ampguard.capture.record import BadResult, RootCall
from ampguard.diagnose.compiled.search import Search, allowed_seconds, guilty_part
from ampguard.diagnose.compiled.traced import operator_of, operators_in
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.locate.chain import Chain, Link
from ampguard.incident import Incident
from ampguard.replay.compiled import AsCompiled, InParts, Part, Seen
from ampguard.replay.compiled_graphs import CaughtGraph
from ampguard.replay.outcome import Outcome
from ampguard.replay.rebuild import Replayer
from ampguard.replay.trace import TracedOp, bad_elements
from ampguard.replay.variants import Variant


@dataclass(frozen=True, slots=True)
class Region:
    """The part of a graph that is at fault, and what it gives compiled and eagerly on the same inputs."""

    graph: CaughtGraph
    part: Part
    is_smallest: bool
    module: int | None
    """Identity of the innermost module that all of it runs in."""
    operators: list[str]
    results: int
    nonfinite: int
    nonfinite_eager: int
    largest_eager: float | None
    largest_difference: float | None
    """Over the results that are finite both ways."""


class CompiledFault(Evidence):
    """What is known about a step that is bad compiled and finite eagerly."""

    phase = "compiled"

    def __init__(
        self,
        bad: BadResult,
        link: Link,
        eager: Outcome,
        search: Search,
        as_ran: Outcome | None,
        region: Region | None,
        is_of_backward: bool,
    ) -> None:
        is_exact = as_ran is not None and as_ran.is_exact
        super().__init__(bad, Chain([link]), dataclasses.replace(eager, is_exact=is_exact), search.replayer)
        self.search = search
        self.as_ran = as_ran
        self.region = region
        self.is_of_backward = is_of_backward

    @property
    def backend(self) -> str:
        """The backend's name; "torch.compile" where the graphs could not be caught."""
        if self.region is not None:
            return compat.name_of(self.region.graph.backend)
        names = sorted({compat.name_of(graph.backend) for graph in self.search.bench.calls})
        return " and ".join(names) or "torch.compile"

    @property
    def module(self) -> str | None:
        """The name of the smallest module that all of the region runs in."""
        known = self.replayer.names if self.replayer is not None else {}
        if self.region is not None and self.region.module in known:
            return known[self.region.module]
        return self.op.module

    def named(self, incident: Incident) -> Incident:
        """The incident under the region's module; without an operator where none can be told."""
        if self.region is None:
            return msgspec.structs.replace(incident, op=None, module=self.module)
        return msgspec.structs.replace(incident, module=self.module)

    def gradients(self) -> tuple[int, int, float | None]:
        """Of the gradients as compiled: how many tensors are not finite, of how many; the largest difference of others."""
        if self.as_ran is None:
            return 0, 0, None
        pairs = [(g, e) for (_, g), (_, e) in zip(self.as_ran.gradients, self.outcome.gradients, strict=False)]
        bad = sum(not numerics.is_finite(g) for g, _ in pairs)
        return bad, len(pairs), largest_difference(pairs)

    def course(self) -> dict[str, Any]:
        """What the search for the part has done, and what it was allowed."""
        search = self.search
        return {
            "compilations": search.bench.compilations,
            "refused": search.refusals,
            "seconds": round(search.seconds, 1),
            "seconds_allowed": round(search.allowed, 1) if math.isfinite(search.allowed) else None,
        }

    def numbers(self) -> dict[str, Any]:
        facts = super().numbers() | {"backend": self.backend, "loss_eager": self.outcome.loss}
        facts["fails_as_compiled"] = self.as_ran.is_bad if self.as_ran is not None else None
        region = self.region
        if region is not None:
            facts |= {
                "region": region.operators,
                "region_is_smallest": region.is_smallest,
                "search": self.course(),
                "results": region.results,
                "nonfinite_compiled": region.nonfinite,
                "nonfinite_eager": region.nonfinite_eager,
                "max_abs_eager": region.largest_eager,
                "max_difference": region.largest_difference,
            }
        if self.bad.kind == "gradient":
            bad, count, difference = self.gradients()
            facts["gradients"] = {"nonfinite": bad, "of": count, "max_difference": difference}
        return facts


def fault_of_compiled_code(bad: BadResult, replayer: Replayer, eager: Outcome, deadline: float) -> CompiledFault | None:
    """Evidence against compiled code, for a step that is finite when it runs eagerly; None where it is finite compiled too.

    The step's graphs are caught, and it is run once more as it was compiled. Then parts of the graphs are compiled by
    themselves, in the time that was left before that until `deadline` (`time.perf_counter()`), or in that which the
    script's own compilation took.
    """
    allowed = allowed_seconds(deadline - time.perf_counter())
    if not compat.may_compile():
        return None
    search = Search(replayer, InParts())
    in_graphs = search.outcome(())
    if in_graphs is None or not search.bench.calls:
        return None
    as_ran = run_as_compiled(search)
    if as_ran is not None and not as_ran.is_bad:
        return None
    search.begin(allowed)
    guilty = guilty_part(search) if not in_graphs.is_bad else None
    if guilty is None:
        last = last_operator(eager, bad)
        if as_ran is None or last is None:
            return None
        return CompiledFault(bad, Link(last, 0, None, kind_of(as_ran)), eager, search, as_ran, None, False)
    part, is_smallest = guilty
    found = search.outcome((part,))
    seen = search.bench.seen.get(part)
    if found is None or seen is None:
        return None
    region = region_of(search, part, is_smallest, seen)
    is_of_backward = region.nonfinite == 0 and bad.kind == "gradient"
    op = operator_of(eager.trace, region.graph, part, seen, replayer, is_of_backward)
    link = Link(op, 0, None, kind_of_outputs(seen) or kind_of(found))
    return CompiledFault(bad, link, eager, search, as_ran or found, region, is_of_backward)


def run_as_compiled(search: Search) -> Outcome | None:
    """The step with its compiled code as it is; None where that cannot be run again without harm.

    With several ranks it could wait for the others, unseen; of CUDA graphs the results would be overwritten.
    """
    if compat.several_ranks() or any(compat.has_graphs_of_device(graph.backend) for graph in search.bench.calls):
        return None
    code = AsCompiled()
    for retains in (False, True):
        code.retains_graph = retains
        try:
            return search.replayer.run(Variant(compiled=code), traced=False)
        except Exception as error:
            if "second time" not in str(error):
                return None
    return None


def region_of(search: Search, part: Part, is_smallest: bool, seen: Seen) -> Region:
    """What the smallest part gives compiled and eagerly, and the module that it is in."""
    graph = search.bench.calls[part.call]
    names = search.replayer.names
    stacks = [[m for m in graph.modules_of(n) if m in names] for n in graph.nodes[part.first : part.last]]
    common = [m for m in stacks[0] if all(m in stack for stack in stacks)] if stacks else []
    pairs = [(c, e) for c, e in zip(seen.outputs, seen.eagerly(), strict=True) if is_float(c) and is_float(e)]
    finite = [e.detach().abs()[torch.isfinite(e)] for _, e in pairs]
    return Region(
        graph,
        part,
        is_smallest,
        common[-1] if common else None,
        [str(op) for op in operators_in(seen)],
        sum(c.numel() for c, _ in pairs),
        sum(int((~torch.isfinite(c)).sum()) for c, _ in pairs),
        sum(int((~torch.isfinite(e)).sum()) for _, e in pairs),
        max((float(t.max()) for t in finite if t.numel()), default=None),
        largest_difference(pairs),
    )


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def largest_difference(pairs: list[tuple[Tensor, Tensor]]) -> float | None:
    """The largest |a - b| over the elements that are finite in both; None where there is none."""
    found = []
    for a, b in pairs:
        if a.shape == b.shape:
            apart = (a.detach().double() - b.detach().double()).abs()
            apart = apart[torch.isfinite(apart)]
            found += [float(apart.max())] if apart.numel() else []
    return max(found, default=None)


def kind_of_outputs(seen: Seen) -> int | None:
    """What the first bad element of a compiled part's results is."""
    for output in seen.outputs:
        bad = bad_elements(output) if is_float(output) else None
        if bad is not None:
            return int(bad.kinds[0])
    return None


def kind_of(outcome: Outcome) -> int:
    """What the first bad element of a replay's results is."""
    for _, tensor in outcome.targets:
        bad = bad_elements(tensor)
        if bad is not None:
            return int(bad.kinds[0])
    return numerics.NAN


def last_operator(eager: Outcome, bad: BadResult) -> TracedOp | None:
    """The last operator of the step's last module call: its results are what the compiled code returned."""
    roots = {event.index for event in bad.record.events if isinstance(event, RootCall)}
    inside = [op for op in eager.trace.ops if op.event in roots and not op.in_backward and op.outputs]
    return inside[-1] if inside else None
