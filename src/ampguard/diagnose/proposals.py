"""Fixes that several causes share, and how each is tried on the failing step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampguard.diagnose import rewrite, words
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Proposal, Trial
from ampguard.replay.operators import flat_tensors
from ampguard.replay.variants import Intervention, Variant


def precision_fixes(evidence: Evidence) -> tuple[Proposal, ...]:
    """Float32 for the smallest region that needs it, bfloat16 for the run, no mixed precision at all."""
    target = words.region(evidence)
    fixes = [Proposal("force-fp32", target, "", search=True)]
    if evidence.precision == torch.float16:
        fixes.append(
            Proposal(
                "use-bf16",
                None,
                "train in bfloat16, which has float32's range: torch.autocast(..., dtype=torch.bfloat16), without GradScaler",
                trial=lambda e: Variant(convert=torch.bfloat16),
            )
        )
    fixes.append(
        Proposal(
            "disable-amp",
            None,
            "run in float32: torch.autocast(..., enabled=False) and GradScaler(enabled=False)",
            trial=lambda e: Variant(convert=torch.float32),
        )
    )
    return tuple(fixes)


def changed_operand(position: int, change: Callable[[Tensor], Tensor]) -> Trial:
    """Replay with one tensor operand of the accused operator changed first."""

    def intervention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = flat_tensors(args, kwargs)[position]
        swap: Callable[[Any], Any] = lambda a: change(a) if a is target else a  # noqa: E731
        new_args = tuple([swap(i) for i in a] if isinstance(a, list) else swap(a) for a in args)
        output = func(*new_args, **{k: swap(v) for k, v in kwargs.items()})
        if any(output is a for a in new_args) and isinstance(output, Tensor) and not any(output is a for a in args):
            return args[0].copy_(output)  # an in-place operator returns the tensor that it was called on
        return output

    return at_the_head(intervention)


def changed_result(change: Callable[[Tensor], Tensor]) -> Trial:
    """Replay with the accused operator's result changed."""

    def intervention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = func(*args, **kwargs)
        if isinstance(output, Tensor):
            new = change(output)
            return output.copy_(new) if any(output is a for a in args) else new
        return type(output)([change(output[0]), *output[1:]])

    return at_the_head(intervention)


def at_the_head(intervention: Intervention) -> Trial:
    """Replay with an intervention wherever the accused line runs the accused operator, as a change of the line would."""
    return lambda evidence: Variant(at_places={evidence.op.place: intervention})


def clamp_fix(evidence: Evidence, position: int, low: float | None, high: float | None) -> Proposal:
    """Keep an operand inside the function's domain."""
    bounds = ", ".join(f"{n}={b:g}" for n, b in (("min", low), ("max", high)) if b is not None)
    names = frozenset({evidence.op.short_name})
    line = rewrite.with_operand(words.code(evidence), names, "{}.clamp(" + bounds + ")")
    return Proposal(
        "clamp",
        words.region(evidence),
        line or f"clamp({bounds}) the operand of {words.operator(evidence)} in: {words.code(evidence)}",
        trial=changed_operand(position, lambda t: t.clamp(min=low, max=high)),
    )


def epsilon_fix(evidence: Evidence, position: int, epsilon: float) -> Proposal:
    """Keep a divisor away from zero."""
    line = rewrite.with_divisor(words.code(evidence), "({} + " + f"{epsilon:g})")
    if line is None:
        names = frozenset({evidence.op.short_name})
        line = rewrite.with_operand(words.code(evidence), names, "({} + " + f"{epsilon:g})")
    return Proposal(
        "add-epsilon",
        words.region(evidence),
        line or f"add {epsilon:g} to what is divided by (or put under the root) in: {words.code(evidence)}",
        trial=changed_operand(position, lambda t: t + torch.where(t < 0, -epsilon, epsilon).to(t.dtype)),
    )


def smallest_epsilon(evidence: Evidence) -> float:
    """An epsilon that survives in the precision in use, with room for a reciprocal of it."""
    return 1e-3 if evidence.precision == torch.float16 else 1e-6
