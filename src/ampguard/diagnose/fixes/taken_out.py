"""Numbers that a script takes out of its tensors and puts back into new ones: `torch.tensor([float(x)])`.

No operator leads from the one to the other, so a replay gives such a number as it was, whatever is changed before it. Where
it was not finite, no fix of what made it can be seen to work.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from ampguard.capture.record import Event, Held, Ref
from ampguard.diagnose import words
from ampguard.diagnose.evidence import Evidence
from ampguard.replay.variants import Variant


def stays_for_a_number(evidence: Evidence, variant: Variant) -> str | None:
    """Why a step that is still bad with this change proves nothing; None where it does. One more replay, if that."""
    numbers = numbers_taken_out(evidence)
    if not numbers or evidence.replayer is None:
        return None
    tensors: dict[int | Ref, Tensor] = {}
    for _, held in numbers:
        tensors[id(held.tensor)] = torch.nan_to_num(held.value.detach(), 0.0, 0.0, 0.0)
    tensors |= variant.tensors
    try:
        outcome = evidence.replayer.run(dataclasses.replace(variant, tensors=tensors), traced=False)
    except Exception:  # it refuses the other numbers: nothing is known
        return None
    if outcome.is_bad:
        return None
    event, _ = numbers[0]
    where = words.code_at(event.line)
    read = f"`{where}` reads" if where else "a later operator reads"
    return (
        f"a replay cannot show it: {read} a number that the script had taken out of its tensors and that stays as it was; "
        f"with 0 in its place the replayed step is finite"
    )


def numbers_taken_out(evidence: Evidence) -> list[tuple[Event, Held]]:
    """Tensors without a history that are not finite, read after the operator at which the trouble begins."""
    head = evidence.chain.head.op.event
    return [(event, held) for event, _, held in evidence.held() if event.index > head and is_taken_out(held)]


def is_taken_out(held: Held) -> bool:
    """Whether a given tensor may have been made of such numbers: no weight, and NaN or a single infinity."""
    tensor = held.tensor
    if not tensor.is_floating_point() or tensor.requires_grad or isinstance(tensor, nn.Parameter):
        return False
    value = held.value.detach()
    return bool(torch.isnan(value).any()) or (value.numel() == 1 and bool(torch.isinf(value).any()))
