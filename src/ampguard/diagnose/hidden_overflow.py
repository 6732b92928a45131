"""Gradients that are lost because the forward pass overflows, and hides it: x / Inf is 0, and so is its derivative.

Nothing of such a step is bad, so it is no failure; no loss scale helps. It comes to light where gradients are found to be 0.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from ampguard.capture.record import BadResult
from ampguard.diagnose import words
from ampguard.incident import Fix, Incident
from ampguard.numerics import dtype_name, is_low_precision, largest
from ampguard.replay.outcome import Outcome
from ampguard.replay.rebuild import Replayer
from ampguard.replay.trace import TracedOp
from ampguard.replay.variants import Variant

Share: TypeAlias = Callable[[Outcome], float]
"""Of a changed replay, the share of its gradients that is lost."""

CURED = 0.02
"""What a fix may leave of that."""


def overflow_behind(
    as_it_ran: Outcome, in_float32: Outcome, among: Container[int] | None = None
) -> tuple[TracedOp, TracedOp] | None:
    """The first result of the forward pass that is infinite in low precision alone, and the same in float32.

    `among`: the numbers of the operators that come into question.
    """
    for op in as_it_ran.trace.ops if among is None else (o for o in as_it_ran.trace.ops if o.index in among):
        if op.in_backward or op.is_tangent or not op.key or any(given.bad is not None for given in op.inputs):
            continue
        if not any(made.bad is not None and is_low_precision(made.dtype) for made in op.outputs):
            continue
        twin = in_float32.trace.aligned(op)
        if twin is not None and twin.outputs and not any(made.bad is not None for made in twin.outputs):
            return op, twin
    return None


def hidden_overflow(
    bad: BadResult,
    replayer: Replayer,
    found: tuple[TracedOp, TracedOp],
    lost: Mapping[str, float],
    share_lost: Share,
    rank: int,
) -> Incident | None:
    """The incident. `lost`: by parameter, the share of its gradient that is 0; `share_lost` says it of a changed replay.

    None where the result would fit, or where the gradients are lost all the same once it is computed in float32: then
    something else loses them (a mask's -Inf is meant).
    """
    op, twin = found
    captured = replayer.run(Variant(convert=torch.float32, capture=frozenset({twin.index})), traced=False).captured
    output = captured[twin.index].output if twin.index in captured else None
    made = next(made for made in op.outputs if made.bad is not None)
    limit, name = largest(made.dtype), dtype_name(made.dtype)
    size = float(output.detach().abs().max()) if isinstance(output, Tensor) and output.numel() else 0.0
    if size <= limit:
        return None
    module = op.module if op.root is not None else None
    where = (
        f"in {module}" if module else "in the root module's forward" if module is not None else "outside every module"
    )
    fixes = _fixes(replayer, op, where, share_lost)
    if not fixes:
        return None
    what = op.short_name
    shown = ", ".join(f"{parameter} {share:.0%}" for parameter, share in lost.items())
    return Incident(
        step=bad.step,
        rank=rank,
        mode="train",
        phase="forward",
        severity="warning",
        cause="fp16-overflow",
        module=module,
        op=op.name,
        dtype=name,
        location=op.line.location() if op.line is not None else None,
        explanation=(
            f"The result of {what} {where} does not fit {name}: it is {words.number(size)} in float32, and {name} ends at "
            f"{limit:g}. What is divided by the Inf becomes 0, so the loss is finite, and gradients that are not 0 in float32 "
            f"are 0 in this step (by layer: {shown}): a larger loss scale saves none of them."
        ),
        evidence={"max_abs_fp32": size, "limit": limit, "lost_gradients": dict(lost), "loss_scale": bad.loss_scale},
        fixes=tuple(fixes),
    )


def _fixes(replayer: Replayer, op: TracedOp, where: str, share_lost: Share) -> list[Fix]:
    """Those that bring the gradients back, the smallest first; none where leaving autocast there does not."""
    device = op.device
    leave = f'leave autocast {where}, torch.autocast("{device}", enabled=False), and give it float32 (x.float())'
    target: str | None = op.module
    if op.owner is not None:
        region = Variant(force_fp32=frozenset({op.owner}))
    elif op.line is not None:
        file = op.line.code.co_filename
        region, target = Variant(fp32_lines=frozenset({(file, op.line.number)})), f"{Path(file).name}:{op.line.number}"
        leave = (
            f'leave autocast for this line, torch.autocast("{device}", enabled=False), and give it float32 (x.float())'
        )
    else:
        return []
    in_bf16 = f'use bfloat16, which has float32\'s range: torch.autocast("{device}", dtype=torch.bfloat16)'
    off = f'compute in float32: torch.autocast("{device}", enabled=False)'
    fixes = []
    for action, on, how, variant in (
        ("force-fp32", target, leave, region),
        ("use-bf16", None, in_bf16, Variant(convert=torch.bfloat16)),
        ("disable-amp", None, off, Variant(convert=torch.float32)),
    ):
        outcome = replayer.run(variant, traced=False)
        left = share_lost(outcome)
        if not outcome.is_bad and left <= CURED:
            result = f"the replayed step is finite, and {left:.0%} of the gradients are lost"
            fixes.append(Fix(action, on, how, True, result))
        elif not fixes:
            return []
    return fixes
