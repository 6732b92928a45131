"""Bad elements that are older than the one at which a chain begins, and reach the same result beside it.

`-2 * (a @ b.T)` in float16: some products are beyond the range, others only once they are doubled. A chain follows one
element, and ends at the doubling where that is one of the latter; the operator before it was the first.
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor

from ampguard.diagnose.locate.chain import Chain
from ampguard.diagnose.locate.contributions import contributing, reached_by
from ampguard.replay.trace import BadElements, Trace, TracedOp

Place = tuple[TracedOp, int, int, int]
"""An operator, which of its results, which element of that, and of which kind it is."""


def older_beside(trace: Trace, chain: Chain, choosing: Set[str]) -> Place | None:
    """What an operator before the head had made bad, where the head hands it on to the result of the chain.

    `choosing`: operators that hand elements on as they are, so that one of another kind was not taken.
    """
    head = chain.head
    if chain.given is not None or head.op.in_backward:
        return None
    made = head.op.outputs[head.result]
    for operand in head.op.inputs:
        if made.bad is None or operand.bad is None or operand.shape != made.shape or operand.storage == made.storage:
            continue
        both = torch.isin(operand.bad.flat, made.bad.flat)
        flat = operand.bad.flat[both]
        reaching = _first_to_reach(chain, flat, choosing) if flat.numel() else None
        if reaching is None:
            continue
        position = int(both.nonzero().reshape(-1)[reaching])
        offset, kind = int(operand.bad.offsets[position]), int(operand.bad.kinds[position])
        writer = trace.writer_of(operand.storage, offset, before=head.op.index)
        if writer is not None and writer[2] is not None:
            return writer[0], writer[1], writer[2], kind
    return None


def _first_to_reach(chain: Chain, flat: Tensor, choosing: Set[str]) -> int | None:
    """Which of these elements of the head's result goes into an element of the chain further on; None where none does."""
    numbers = torch.arange(len(flat), device=flat.device)
    for link, after in zip(reversed(chain.links), reversed(chain.links[:-1]), strict=False):
        made, target = link.op.outputs[link.result], after.op.outputs[after.result]
        number = next(
            (n for n, t in enumerate(after.op.inputs) if t.bad is not None and t.storage == made.storage), None
        )
        operand = after.op.inputs[number] if number is not None else None
        if number is None or operand is None or operand.bad is None or made.bad is None:
            return None
        of_kind = operand.bad.kinds == after.kind if after.op.short_name in choosing else None
        flat, numbers = _as_read(made.bad, operand.bad, of_kind, flat, numbers)
        if not flat.numel():
            return None
        test = contributing(after.op, number, after.result, after.flat)
        hits = test(flat).nonzero().reshape(-1) if test is not None else numbers[:1] * 0
        if hits.numel():
            return int(numbers[hits[0]])
        reached = flat if operand.shape == target.shape else reached_by(after.op, number, after.result, flat)
        if reached is None:
            return None
        flat = reached
    return None


def _as_read(
    made: BadElements, read: BadElements, wanted: Tensor | None, flat: Tensor, numbers: Tensor
) -> tuple[Tensor, Tensor]:
    """Elements of a result as the next operator reads them, perhaps through a view: matched by where they lie."""
    is_bad = torch.isin(flat, made.flat)
    offsets = made.offsets[_places(flat[is_bad], made.flat)]
    read_flat, read_at = (read.flat, read.offsets) if wanted is None else (read.flat[wanted], read.offsets[wanted])
    is_read = torch.isin(offsets, read_at)
    return read_flat[_places(offsets[is_read], read_at)], numbers[is_bad][is_read]


def _places(wanted: Tensor, known: Tensor) -> Tensor:
    """Where each of these numbers stands among known ones, all of which it is one of."""
    order = known.argsort()
    return order[torch.searchsorted(known[order], wanted)]
