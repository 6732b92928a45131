"""From the bad result back along the chain of non-finite values to where the chain begins.

The first non-finite tensor in time is often innocent (a causal mask is full of -Inf). So one bad element is followed
backwards: at each operator to a non-finite operand element that went into it, until an operator made it from finite
operands (the head), or it was given (a parameter, an input). Where several elements could be followed, those that no
infinite constant explains are preferred.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from ampguard.diagnose.locate.chain import Chain, Given, Link
from ampguard.diagnose.locate.contributions import contributing, reached_by
from ampguard.diagnose.locate.first_samples import of_first_samples
from ampguard.diagnose.locate.joined import older_beside
from ampguard.diagnose.locate.lineage import logdet_around
from ampguard.diagnose.locate.on_purpose import is_mask_in_log_space, makes_infinity_on_purpose
from ampguard.numerics import NAN, NEG_INF, POS_INF
from ampguard.replay.trace import BadElements, Trace, TracedOp, TracedTensor

MAX_VISITS = 800
"""Of elements, once a beginning was found. The way to the first one may be as long as the trace: a recurrence of many steps."""
MAX_VISITS_OF_MANY = 4000
"""The same for all of several results together; each is begun as long as some of these are left."""
VISITS_PER_OP = 8
MAX_ELDERS = 4
GRADIENTS_BEFORE = 64
"""Bad results of a backward pass before some memory was asked for, of which one of its shape is looked for."""
ENDS = 2
"""Bad elements of a result that are followed, where no infinite constant explains them."""
BLOCK, MAX_BLOCKS = 1 << 20, 16
"""Of a large operand this many elements are asked about at once, and this many times."""
COPIES: frozenset[str] = frozenset(
    [
        "where",
        "copy",
        "_to_copy",
        "clone",
        "masked_fill",
        "fill",
        "cat",
        "stack",
        "index",
        "gather",
        "embedding",
        "index_select",
        "index_put",
        "index_fill",
        "scatter",
        "select_backward",
        "slice_scatter",
        "lift_fresh",
        "lift_fresh_copy",
        "max",
        "amax",
        "min",
        "amin",
        "maximum",
        "minimum",
        "masked_select",
        "max_pool2d_with_indices",
    ]
)
"""Operators that hand elements on: the kind of a result's element is the kind of the operand's element."""


Place: TypeAlias = tuple[int, int, int | None]
"""An element of a result: the operator's number, which result, and the element's flat position."""


@dataclass(slots=True)
class Visited:
    """The places that were visited on the way back from several results: what lies behind those is known.

    `by_kind`: by the kind of the element that was begun with. `left`: how many more are visited for further ones.
    """

    by_kind: dict[int, set[Place]] = field(default_factory=dict)
    left: int = MAX_VISITS_OF_MANY


def chain_from(trace: Trace, tensor: TracedTensor, bad: BadElements, visited: Visited | None = None) -> Chain | None:
    """The chain behind the bad elements of a result. None where no operator of the trace made them.

    Of those behind its first and its last bad element, the one that begins first. `visited`: of one of many results, of which
    the first that begins on its own will do. None where nothing new is found.
    """
    best: Chain | None = None
    fallback: Chain | None = None
    wanted = 1 if visited is not None else ENDS
    first = of_first_samples(trace, len(trace.ops), tensor.shape, bad.flat, torch.arange(bad.flat.numel()))
    for position in dict.fromkeys((*first, *_starts(bad))):
        offset, flat = int(bad.offsets[position]), int(bad.flat[position])
        writer = trace.writer_of(tensor.storage, offset, before=len(trace.ops))
        if writer is None and tensor.made_by is not None:
            op = trace.ops[tensor.made_by[0]]
            writer = (op, tensor.made_by[1], flat) if op.outputs[tensor.made_by[1]].bad is not None else None
        if writer is None:
            continue
        kind = int(bad.kinds[position])
        seen = visited.by_kind.setdefault(kind, set()) if visited is not None else set[Place]()
        if visited is not None and visited.left <= 0:
            break
        known = len(seen)
        chain = _explore(trace, Link(writer[0], writer[1], writer[2], kind), seen)
        if visited is not None:
            visited.left -= len(seen) - known
        if chain is None:
            continue
        best, fallback = _ranked(best, fallback, chain)
        wanted -= not chain.intended
        if not wanted:
            break
    found = _from_its_elders(trace, best) if best is not None else fallback
    return _of_the_step(found) if found is not None else None


def _from_its_elders(trace: Trace, chain: Chain) -> Chain:
    """The chain, begun where an element was made bad before its own, that joins it on the way to the result."""
    for _ in range(MAX_ELDERS):
        place = older_beside(trace, chain, COPIES)
        before = _explore(trace, Link(*place), set()) if place is not None else None
        if before is None or before.intended or before.given is not None:
            break
        chain = Chain([*chain.links, *before.links])
    return chain


def chain_to(trace: Trace, op: TracedOp, result: int, flat: int, kind: int) -> Chain:
    """The chain behind one bad element of an operator's result."""
    link = Link(op, result, flat, kind)
    return _of_the_step(_explore(trace, link, set()) or Chain([link]))


def _of_the_step(chain: Chain) -> Chain:
    """The same chain, without the replay's own copy of an argument where it ends at one, or what brought it to a device."""
    while (
        chain.given is not None
        and len(chain.links) > 1
        and (_is_of_the_replay(chain.head.op) or _only_brings(chain.head.op))
    ):
        chain.links.pop()
    return chain


def _only_brings(op: TracedOp) -> bool:
    """Whether an operator computes nothing: it copies a tensor to another device (`batch.to("cuda")`)."""
    if op.short_name != "_to_copy" or len(op.inputs) != 1 or len(op.outputs) != 1:
        return False
    (given,), (made,) = op.inputs, op.outputs
    return given.dtype == made.dtype and given.device != made.device


def _meets_another(trace: Trace, op: TracedOp, models: frozenset[int]) -> bool:
    """Whether an infinity of a batch's meets one that was written into what the model computed: both forbid the same (a
    divergence between two distributions that are masked alike)."""
    infinite = [t.made_by[0] for t in op.inputs if t.bad is not None and t.made_by is not None]
    return len(infinite) > 1 and not _computed_by(trace, models).isdisjoint(infinite)


def at_the_data(chain: Chain, trace: Trace, models: Sequence[int]) -> Chain:
    """The same chain, ended at the model's input, or at the target, where it begins at a NaN or Inf literal written there.

    An infinity that is written after the model has run may be a mask of its scores; a NaN is none. `models`: the events
    in which the model runs.
    """
    if not models or logdet_around(trace, chain.head.op) is not None:  # (a number of PyTorch's own)
        return chain
    numbers = (
        [number for number in chain.head.op.scalars if not math.isfinite(number)]
        if chain.given is None
        else [math.nan if chain.given.kind == NAN else math.inf][: math.prod(chain.given.tensor.shape) == 1]
    )
    if chain.head.op.event < models[0]:
        inside = [link for link in chain.links if link.op.event >= models[0] and not _is_of_the_replay(link.op)]
    else:
        numbers = [number for number in numbers if math.isnan(number)]
        computed = _computed_by(trace, frozenset(models)) if numbers else frozenset()
        inside = (
            [link for link in chain.links if link.op.index in computed] if chain.head.op.index not in computed else []
        )
    if not numbers or not inside:
        return chain
    last = inside[-1]
    if last.kind == NAN and not any(map(math.isnan, numbers)) and _meets_another(trace, last.op, frozenset(models)):
        return chain
    for operand, tensor in enumerate(last.op.inputs):
        if tensor.bad is not None:
            given = Given(tensor, int(tensor.bad.flat[0]), int(tensor.bad.kinds[0]), last.op, operand)
            return Chain(inside, given, intended=False, is_data=True)
    return chain


def _computed_by(trace: Trace, models: frozenset[int]) -> frozenset[int]:
    """The operators of a model's calls, and those that depend on their results."""
    found: set[int] = set()
    for op in trace.ops:
        if op.event in models or any(t.made_by is not None and t.made_by[0] in found for t in op.inputs):
            found.add(op.index)
    return frozenset(found)


def _is_of_the_replay(op: TracedOp) -> bool:
    """The copy of an argument that a replay hands to a module: no operator of the step."""
    return op.short_name == "clone" and op.root is not None and op.module is None


def _starts(bad: BadElements) -> list[int]:
    """A few elements to begin from: the first of each kind (NaN, +Inf, -Inf), then some more, spread out."""
    starts: list[int] = []
    for kind in (NAN, POS_INF, NEG_INF):
        hits = (bad.kinds == kind).nonzero().reshape(-1)
        if hits.numel():
            starts += [int(hits[i]) for i in (0, hits.numel() - 1, hits.numel() // 2)]
    return list(dict.fromkeys(starts))


def _explore(trace: Trace, start: Link, seen: set[Place]) -> Chain | None:
    """The ways back, the earliest operator first: of the beginnings that no intended infinity explains, the earliest.

    The first way on from the first fork has visits to an operator of its own, and so have the others: the elements of one
    row would take them all. None where all ways lead to places that were `seen` before.
    """
    knows_others = bool(seen)
    best: Chain | None = None
    fallback: Chain | None = None
    order = itertools.count()
    frontier = [(start.op.index, next(order), start, [start], 0)]
    visits_of: Counter[tuple[int, int]] = Counter()
    for visit in range(MAX_VISITS + len(trace.ops)):
        if not frontier or (visit >= MAX_VISITS and (best is not None or fallback is not None)):
            break
        _, _, link, links, way = heapq.heappop(frontier)
        place = (link.op.index, link.result, link.flat)
        if place in seen or visits_of[way, link.op.index] >= VISITS_PER_OP:
            continue
        seen.add(place)
        visits_of[way, link.op.index] += 1
        steps = _steps_back(trace, link)
        if not steps:
            is_meant = makes_infinity_on_purpose(link) or is_mask_in_log_space(trace, links)
            best, fallback = _ranked(best, fallback, Chain(links, intended=is_meant))
        for number, step in enumerate(steps):
            if isinstance(step, Given):
                chain = Chain(links, given=step, intended=_is_meant(step, start.op.in_backward))
                best, fallback = _ranked(best, fallback, chain)
            else:
                on = way or (min(number, 1) + 1 if len(steps) > 1 else 0)
                heapq.heappush(frontier, (step.op.index, next(order), step, [*links, step], on))
    return best or fallback or (None if knows_others else Chain([start]))


def _ranked(best: Chain | None, fallback: Chain | None, new: Chain) -> tuple[Chain | None, Chain | None]:
    """The two chains to keep: the earliest beginning so far, and of those that began on purpose that of which something else
    became first."""
    if not new.intended:
        return (new if best is None or new.head.op.index < best.head.op.index else best), fallback
    if fallback is None:
        return best, new
    known, found = fallback.conversion(), new.conversion()
    is_earlier = known is not None and found is not None and found.op.index < known.op.index
    return best, new if is_earlier or (known is None and found is not None) else fallback


def _is_meant(given: Given, is_of_gradients: bool) -> bool:
    """Whether an infinity that was given can be one that the code meant to have: a mask's, a sentinel's, the ends of a range.

    A parameter's is none, unless it left the loss finite and only forbids. Where there are several of either sign something
    has been computed.
    """
    if given.kind == NAN:
        return False
    parameter = _parameter_behind(given)
    if parameter is not None:
        return is_of_gradients and only_forbids(parameter)
    bad = given.tensor.bad
    return bad is None or any(int((bad.kinds == kind).sum()) < 2 for kind in (POS_INF, NEG_INF))


def only_forbids(parameter: torch.Tensor) -> bool:
    """Whether nothing but -Inf is bad in a parameter: scores of what is never to be chosen, as in a CRF's transitions."""
    values = parameter.detach()
    return not bool((values.isnan() | values.isposinf()).any())


def _parameter_behind(given: Given) -> torch.Tensor | None:
    live = given.tensor.live() if given.tensor.live is not None else None
    return live if isinstance(live, torch.nn.Parameter) else None


def _steps_back(trace: Trace, link: Link) -> list[Link | Given]:
    """Where the bad element may have come from, the likeliest first; empty where this operator made it."""
    op = link.op
    options: list[tuple[tuple[int, bool, int], Link | Given, int]] = []
    for operand, tensor in enumerate(op.inputs):
        bad = tensor.bad
        if bad is None:
            continue
        test = contributing(op, operand, link.result, link.flat)
        mask = torch.ones_like(bad.flat, dtype=torch.bool) if test is None else test(bad.flat)
        if test is not None and not bool(mask.any()) and _may_lie_beyond(bad, tensor, test):
            mask = torch.ones_like(mask)  # what went in was not kept: one of its like tells the way
        if op.short_name in COPIES:
            mask &= bad.kinds == link.kind
        for kind in (NAN, POS_INF, NEG_INF):
            hits = (mask & (bad.kinds == kind)).nonzero().reshape(-1)
            if not hits.numel() or not _can_explain(op, link.kind, kind):
                continue
            first = (
                *of_first_samples(trace, op.index, tensor.shape, bad.flat, hits),
                *_older(trace, op, tensor, bad, hits),
            )
            for hit in dict.fromkeys((*first, *_spread(hits))):
                step = _origin(trace, op, operand, tensor, bad, hit)
                options.append(((_preference(link.kind, kind), isinstance(step, Given), operand), step, kind))
    if any(kind_read == link.kind for (_, _, _), _, kind_read in options):  # a NaN operand explains a NaN by itself
        options = [option for option in options if option[2] == link.kind]
    options.sort(key=lambda option: option[0])
    return [step for _, step, _ in options]


def _may_lie_beyond(bad: BadElements, tensor: TracedTensor, test: Callable[[Tensor], Tensor]) -> bool:
    """Whether an element that went in lies behind those that were kept of an operand with too many bad ones."""
    if bad.is_complete:
        return False
    first, size = int(bad.flat[-1]) + 1, math.prod(tensor.shape)
    blocks = range(first, size, BLOCK)
    return len(blocks) > MAX_BLOCKS or any(
        bool(test(torch.arange(at, min(at + BLOCK, size), device=bad.flat.device)).any()) for at in blocks
    )


def _spread(hits: Tensor) -> tuple[int, int, int]:
    """The ends of what went in and its middle: what spread from one place (over a graph, a sequence) is oldest away from it."""
    return int(hits[0]), int(hits[-1]), int(hits[len(hits) // 2])


def _older(trace: Trace, reader: TracedOp, tensor: TracedTensor, bad: BadElements, hits: Tensor) -> list[int]:
    """One of the hits that an operand of their maker was bad for already: the others may have begun there."""
    writer = trace.writer_of(tensor.storage, int(bad.offsets[hits[0]]), before=reader.index) if len(hits) > 2 else None
    if writer is None:
        return []
    key = (id(bad), writer[0].index, writer[1])
    if key not in trace.older:
        trace.older[key] = _bad_before(bad, *writer[:2])
    mask = trace.older[key]
    found = mask[hits].nonzero().reshape(-1) if mask is not None else hits[:0]
    return [int(hits[found[0]])] if found.numel() else []


def _bad_before(bad: BadElements, maker: TracedOp, result: int) -> Tensor | None:
    """Which of these elements an operand of their maker had at the same place (or, summed up, in the same row) already.

    None where that cannot be seen.
    """
    made = maker.outputs[result]
    before: list[Tensor] = []
    for number, operand in enumerate(maker.inputs):
        if operand.bad is not None:
            alike = operand.shape == made.shape
            places = operand.bad.flat if alike else reached_by(maker, number, result, operand.bad.flat)
            before += [places] if places is not None else []
    if made.bad is None or not before:
        return None
    older = made.bad.offsets[_among(made.bad.flat, torch.cat(before))]  # (it may be read through a view)
    return _among(bad.offsets, older)


def _among(places: Tensor, known: Tensor) -> Tensor:
    """Which of these places are known ones. One pass over each, where `torch.isin` would sort them."""
    if not places.numel() or not known.numel():
        return torch.zeros_like(places, dtype=torch.bool)
    first = int(min(places.min(), known.min()))
    table = torch.zeros(int(max(places.max(), known.max())) - first + 1, dtype=torch.bool, device=places.device)
    table[known - first] = True
    return table[places - first]


def _can_explain(op: TracedOp, made: int, read: int) -> bool:
    """A NaN never turns into an infinity by arithmetic."""
    return not (read == NAN and made != NAN)


def _preference(made: int, read: int) -> int:
    if read == made:
        return 0
    return 1 if read == POS_INF else 2


def _origin(
    trace: Trace, reader: TracedOp, operand: int, tensor: TracedTensor, bad: BadElements, hit: int
) -> Link | Given:
    offset, flat, kind = int(bad.offsets[hit]), int(bad.flat[hit]), int(bad.kinds[hit])
    writer = trace.writer_of(tensor.storage, offset, before=reader.index)
    if writer is None:
        memory = trace.memory_of(tensor)
        beyond = _beyond_opaque(trace, memory[0], tensor, flat, kind) if memory is not None else None
        return beyond or Given(tensor, flat, kind, reader, operand, memory)
    op, result, position = writer
    return Link(op, result, position, kind)


def _beyond_opaque(trace: Trace, memory: TracedOp, written: TracedTensor, flat: int, kind: int) -> Link | Given | None:
    """Where the bad element comes from that something unseen wrote to `memory`: from a bad one that it may have read.

    Of a tensor of the same shape the element itself, or one of its row; of another, any.
    """
    for operand, tensor in enumerate(memory.around):
        bad = tensor.bad
        if bad is None:
            continue
        hits = torch.arange(bad.flat.numel())
        if tensor.shape == written.shape:
            same, width = (bad.flat == flat).nonzero().reshape(-1), tensor.shape[-1] if tensor.shape else 1
            hits = same if same.numel() else (bad.flat // width == flat // width).nonzero().reshape(-1)
        hits = hits[bad.kinds[hits] != NAN] if kind != NAN else hits
        if not hits.numel():
            continue
        step = _origin(trace, memory, operand, tensor, bad, int(hits[0]))
        if isinstance(step, Link) or step.reader is not memory or operand < len(memory.inputs):
            return step
    return _gradient_before(trace, memory, kind) if memory.in_backward else None


def _gradient_before(trace: Trace, memory: TracedOp, kind: int) -> Link | None:
    """The last bad result of the backward pass before `memory` was asked for: what a custom function's `backward` is given
    is no operand of what it asks for. One of the same shape, if there is any.
    """
    before = (op for op in reversed(trace.ops[: memory.index]) if op.in_backward and op.is_bad)
    found = [link for op in itertools.islice(before, GRADIENTS_BEFORE) if (link := _bad_of(op, kind)) is not None]
    shape = memory.outputs[0].shape
    return next((link for link in found if link.op.outputs[link.result].shape == shape), found[0] if found else None)


def _bad_of(op: TracedOp, kind: int) -> Link | None:
    """A bad element of an operator's results that can have become one of this kind."""
    for position, made in enumerate(op.outputs):
        hits = (made.bad.kinds != NAN).nonzero() if made.bad is not None and kind != NAN else None
        if made.bad is not None and (hits is None or hits.numel()):
            hit = int(hits[0]) if hits is not None else 0
            return Link(op, position, int(made.bad.flat[hit]), int(made.bad.kinds[hit]))
    return None
