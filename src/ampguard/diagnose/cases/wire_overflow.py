"""Gradients that are finite on this rank, and leave the range of the type in which DDP's hook sends them.

`fp16_compress_hook` casts float32 gradients to float16 before they are summed over ranks: 2e5 becomes Inf on the way, and
every rank gets it back. What the hook would send of this rank's own gradients is computed, and nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ampguard import compat
from ampguard.capture.record import BackwardCall, BadResult, RootCall
from ampguard.diagnose import words
from ampguard.incident import Fix, Incident
from ampguard.numerics import dtype_name, largest
from ampguard.replay.names import module_of_parameter
from ampguard.replay.rebuild import Replayer
from ampguard.replay.wire import Gradient, Sent, sent_by

MAX_NAMES = 12


@dataclass(frozen=True, slots=True)
class Overflow:
    """What of `sent` is too large: by itself, or (`in_sum`) times the number of ranks. `lost`: parameter and elements."""

    sent: Sent
    hook: Any
    ranks: int
    in_sum: bool
    lost: list[tuple[Tensor, int]]


def overflow_on_the_wire(bad: BadResult, replayer: Replayer, rank: int) -> Incident | None:
    """The incident of a step whose gradients the hook could not send; None where there is none, or they fit. One replay.

    Of a step that the scaler held off, the gradients are taken at a loss scale of 1: what overflows only with the scale,
    a smaller scale cures.
    """
    if bad.kind != "gradient" or bad.error is not None:
        return None
    models = [ddp for ddp in _ddp_models(bad) if compat.communication_hooks(ddp)]
    if not models:
        return None
    gradients = replayer.run(traced=False).gradients
    if bad.is_held_off and bad.loss_scale is not None:
        gradients = [(parameter, gradient / bad.loss_scale) for parameter, gradient in gradients]
    for ddp in models:
        names = {id(parameter): name for name, parameter in compat.named_parameters(ddp.module).items()}
        found = _overflow_of(ddp, [(p, g) for p, g in gradients if id(p) in names])
        if found is not None:
            return _incident(bad, found, names, rank)
    return None


def _ddp_models(bad: BadResult) -> list[DistributedDataParallel]:
    roots = [event.module for event in bad.record.events if isinstance(event, RootCall)]
    inner = [
        module for root in roots for module in compat.all_modules(root) if isinstance(module, DistributedDataParallel)
    ]
    return list(dict.fromkeys(inner))


def _overflow_of(ddp: DistributedDataParallel, gradients: list[Gradient]) -> Overflow | None:
    ranks = torch.distributed.get_world_size(ddp.process_group)
    for hook, state in compat.communication_hooks(ddp):
        for sent in sent_by(hook, state, gradients):
            if largest(sent.tensor.dtype) >= largest(sent.gradients[0][1].dtype):
                continue  # bfloat16 has float32's range
            lost = _lost(sent, sent.tensor.isfinite().logical_not())
            if lost is not None:
                return Overflow(sent, hook, ranks, False, lost)
            lost = _lost(sent, sent.tensor.double().abs() * ranks > largest(sent.tensor.dtype), in_sum=True)
            if lost is not None:
                return Overflow(sent, hook, ranks, True, lost)
    return None


def _lost(sent: Sent, is_lost: Tensor, in_sum: bool = False) -> list[tuple[Tensor, int]] | None:
    """The parameters some of whose elements are lost, and how many; None where that is not why they came back bad.

    What was sent as Inf came back bad. In a sum (of numbers of either sign) what came back bad was sent too large: an
    element that is small here was made bad by another rank.
    """
    lost = []
    parts = is_lost.split([parameter.numel() for parameter, _ in sent.gradients])
    for (parameter, _), part in zip(sent.gradients, parts, strict=True):
        if parameter.grad is not None:
            is_bad = parameter.grad.reshape(-1).isfinite().logical_not()
            cause, effect = (is_bad, part) if in_sum else (part, is_bad)
            if bool((cause & ~effect).any()):
                return None
            lost.append((parameter, int(cause.sum())))
    return [one for one in lost if one[1]] or None


def _incident(bad: BadResult, found: Overflow, names: dict[int, str], rank: int) -> Incident:
    sent = found.sent
    dtype = dtype_name(sent.tensor.dtype)
    worst, gradient = max(sent.gradients, key=lambda one: float(one[1].abs().max()) if one[1].numel() else 0.0)
    peak, limit = float(gradient.abs().max()), largest(sent.tensor.dtype)
    hook = getattr(found.hook, "__qualname__", type(found.hook).__name__)
    lost = sum(count for _, count in found.lost)
    call = next((e for e in reversed(bad.record.events) if isinstance(e, BackwardCall)), None)
    line = sent.line or (call.line if call is not None else None)
    happened = (
        f"the sum over {found.ranks} ranks leaves that range in up to {lost} elements"
        if found.in_sum
        else f"{lost} elements became Inf before they were sent, and every rank got them back"
    )
    return Incident(
        step=bad.step,
        rank=rank,
        mode=bad.mode,
        phase="backward",
        severity="error",
        cause="gradient-overflow",
        module=module_of_parameter(names[id(found.lost[0][0])]),
        op=sent.collective if found.in_sum else sent.op,
        dtype=dtype,
        location=line.location() if line is not None else None,
        explanation=f"The gradients of this rank are finite (up to {words.number(peak)}, of `{names[id(worst)]}`). DDP's "
        f"communication hook `{hook}` sends them in {dtype}, which ends at {limit:g}: {happened}.",
        evidence={
            "hook": hook,
            "sent_as": dtype,
            "limit": limit,
            "max_abs_gradient": peak,
            "in_sum": found.in_sum,
            "elements": lost,
            "parameters": [names[id(p)] for p, _ in found.lost][:MAX_NAMES],
            "world_size": found.ranks,
            "loss_scale": bad.loss_scale,
            "rung": "replay",
        },
        fixes=(
            Fix(
                "use-bf16",
                hook,
                "send bfloat16, which has float32's range (over NCCL): default_hooks.bf16_compress_hook",
            ),
            Fix("force-fp32", hook, "send the gradients as they are: register no hook"),
        ),
    )
