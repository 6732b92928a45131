"""indeterminate: Inf - Inf or 0 * Inf, from an infinity that the code meant to have.

What happens   an infinity that stands for "never" or "unbounded" (a beam score, a distance, a mask) meets another one in a
               difference, or a 0 in a product, and becomes NaN; or it is summed up with ordinary numbers, as label smoothing
               sums up the log-probabilities of all classes, those that a mask forbids too; or it is subtracted (a ratio of
               probabilities of which the lower one is 0), and is the largest number of all then.
Why it hurts   each of the operands is fine by itself.
Instead        use a large finite number in place of the infinity, or torch.where in place of arithmetic with it; leave what
               is masked out of a sum; bound a difference of log-probabilities before it is exponentiated.
Not this       a softmax row without a key: see masked-softmax.
"""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import torch

from ampguard.capture.record import Held, Ref, RootCall
from ampguard.diagnose import words
from ampguard.diagnose.code import accused
from ampguard.diagnose.code.rewrite import clamped_result, with_constant
from ampguard.diagnose.code.source import line_of_code
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Finding, Proposal, cause
from ampguard.diagnose.fixes.one_sample import left_out
from ampguard.diagnose.fixes.proposals import changed_result
from ampguard.diagnose.givens.named_arguments import named_leaves
from ampguard.replay.trace import TracedOp
from ampguard.replay.variants import Variant

BOUND = 1e30
"""In the place of an infinity that a sum, a difference or a softmax of float32 then bears."""

LARGEST_EXPONENT = 20
"""In the place of a difference of logarithms that is +Inf: its exponential fits float32 and leaves room for what follows."""


@cause("indeterminate")
def indeterminate(evidence: Evidence) -> Finding | None:
    if evidence.op.refused:
        return None
    if evidence.kind != "nan":
        return _turned_round(evidence) or _summed_up(evidence)
    by_a_literal = evidence.given is None and any(math.isinf(s) for s in evidence.scalars)
    if not by_a_literal and not (evidence.intended and evidence.converts):
        return None
    name = words.operator(evidence)
    operands = [o for o in evidence.float_operands if by_a_literal or o.stats.finite_share < 1]
    source = evidence.chain.head.op
    made = _made(evidence)
    filtering = left_out(evidence, "all that is summed up for it is -Inf") if _has_infinite_rows(evidence) else None
    return Finding(
        "indeterminate",
        f"{name} {words.place(evidence)} combines infinities that the code meant to have ({made}) into "
        f"NaN: Inf - Inf or 0 * Inf.",
        weight=40,
        evidence={"operands": [o.stats.as_dict() for o in operands]},
        proposals=(_finite_constant(evidence, source), *([filtering] if filtering is not None else [])),
    )


def _made(evidence: Evidence) -> str:
    return f"made by {evidence.chain.head.op.short_name}" if evidence.given is None else "in what it was given"


def _turned_round(evidence: Evidence) -> Finding | None:
    """A -Inf that was meant ("never", a probability of 0) is subtracted: +Inf, which nothing takes for that any more."""
    operands = [o for o in evidence.float_operands if o.stats.finite_share < 1]
    if not (evidence.intended and evidence.converts and evidence.kind == "+inf" and operands):
        return None
    bound = f"max={LARGEST_EXPONENT}"
    written = accused.with_changed_result(evidence, clamped_result(bound))
    how = written or f"bound its result with .clamp({bound}), or leave these elements out: {words.code(evidence)}"
    return Finding(
        "indeterminate",
        f"{words.operator(evidence)} {words.place(evidence)} turns infinities that the code meant to have "
        f"({_made(evidence)}) into +Inf: an ordinary number less -Inf.",
        weight=20,
        evidence={"operands": [o.stats.as_dict() for o in operands]},
        proposals=(
            Proposal(
                "clamp",
                words.region(evidence),
                how,
                trial=changed_result(lambda t: t.clamp(max=LARGEST_EXPONENT)),
            ),
        ),
    )


def _has_infinite_rows(evidence: Evidence) -> bool:
    """Whether a whole row of an operand (of a vector: an element) is -Inf: a log-sum-exp by hand takes its maximum from it."""
    values = (o.values for o in evidence.float_operands if o.values.dim())
    return any(bool((v == -math.inf).reshape(len(v), -1).all(1).any()) for v in values if v.numel())


def _summed_up(evidence: Evidence) -> Finding | None:
    """An infinity that was meant for single elements, in a sum over them that is a part of the result."""
    if not evidence.intended or evidence.converts:
        return None
    sums = (link for link in reversed(evidence.chain.links) if link.op.short_name in ("sum", "mean"))
    summing = next(sums, None)
    if summing is None or summing.op.line is None:
        return None
    source, op = evidence.op, summing.op
    where = source.line.location() if source.line is not None else None
    made = f" ({words.name(source)} at {Path(where.file).name}:{where.line} makes them)" if where is not None else ""
    how = (
        "leave the infinite elements out of the sum, as torch.where(torch.isinf(x), 0.0, x) does (with label_smoothing a cross "
        "entropy sums up the log-probabilities of all classes: set it to 0 where classes are masked, or smooth by hand over "
        "those that are left)"
    )
    return Finding(
        "indeterminate",
        f"{words.name(op)} takes in infinities that the code meant for single elements{made}: the sum is as infinite as they.",
        weight=30,
        evidence={"made_by": source.name},
        proposals=(Proposal("stable-form", words.region(evidence), how, trial=lambda e: _without_infinities(op)),),
        op=op,
    )


def _without_infinities(op: TracedOp) -> Variant:
    """The step with the infinite operands of `op` left out."""

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(torch.where(torch.isinf(args[0]), 0.0, args[0]), *args[1:], **kwargs)

    return Variant(at_places={op.place: run})


def _finite_constant(evidence: Evidence, source: TracedOp) -> Proposal:
    """A large finite number where the infinity is written, else in words."""
    given = _as_argument(evidence)
    if given is not None:
        how = f"keep it finite with {given}, before: {words.code(evidence)}"
        return Proposal("mask-value", words.region(evidence), how, trial=lambda e: _finite_operands(e, BOUND))
    in_words = Proposal(
        "mask-value",
        words.region(evidence),
        f"clamp the infinities that {words.operator(evidence)} is given to a large finite number "
        f"(torch.finfo(dtype).min / 2), or leave them out with torch.where, in: {words.code(evidence)}",
        trial=_finite_operands,
    )
    constant = next((s for s in source.scalars if math.isinf(s)), None)
    line = line_of_code(source.line) if source.line is not None else None
    if constant is None or line is None:
        return in_words
    lowest = torch.finfo(source.outputs[0].dtype).min / 2
    text = f"torch.finfo({source.outputs[0].dtype}).{'min' if constant < 0 else 'max'} / 2"
    written = with_constant(line, constant, text)
    if written is None:
        return in_words

    def finite(value: object) -> object:
        return math.copysign(lowest, value) if isinstance(value, float) and math.isinf(value) else value

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*(finite(a) for a in args), **{k: finite(v) for k, v in kwargs.items()})

    how = f"a large finite number in place of the infinity: {words.marked(written, source, evidence.op)}"
    trial = Variant(at_places={source.place: run})
    return Proposal("mask-value", words.region(evidence), how, trial=lambda e: trial, otherwise=in_words)


def _as_argument(evidence: Evidence) -> str | None:
    """`hops = hops.clamp(max=1e30)` where the infinite operand is an argument that the accused line reads by its name."""
    infinite = [o for o in evidence.float_operands if bool(torch.isinf(o.values).any())]
    line = evidence.op.line
    if evidence.given is None or len(infinite) != 1 or line is None or evidence.precision is not None:
        return None
    found = line_of_code(line)
    arguments = line.code.co_varnames[: line.code.co_argcount]
    read = {n.id for part, _ in found.parts for n in ast.walk(part) if isinstance(n, ast.Name)} if found else set()
    leaves = (name for e in evidence.events() if isinstance(e, RootCall) for name, leaf in named_leaves(e)
              if _holds(evidence, leaf, infinite[0].values))  # fmt: skip
    name = next((name for name in leaves if name in read and name in arguments), None)
    if name is None:
        return None
    values = infinite[0].values
    sides = {"min=-1e30": bool((values == -math.inf).any()), "max=1e30": bool((values == math.inf).any())}
    return f"{name} = {name}.clamp({', '.join(side for side, is_there in sides.items() if is_there)})"


def _holds(evidence: Evidence, leaf: object, values: torch.Tensor) -> bool:
    tensor = leaf.value if isinstance(leaf, Held) else evidence.made(leaf) if isinstance(leaf, Ref) else None
    return tensor is not None and tensor.shape == values.shape and torch.equal(tensor.to(values), values)


def _finite_operands(evidence: Evidence, bound: float | None = None) -> Variant:
    """The accused operator on the same operands, their infinities replaced by large finite numbers (the bound)."""

    def run(func: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        tensor = next((a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()), None)
        largest = torch.finfo(tensor.dtype if tensor is not None else torch.float32).max / 4

        def finite(value: object) -> object:
            if isinstance(value, float) and math.isinf(value):
                return math.copysign(largest, value)
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                edge = bound or torch.finfo(value.dtype).max / 4
                return torch.where(torch.isinf(value), value.clamp(-edge, edge), value)
            return value

        return func(*(finite(a) for a in args), **kwargs)  # type: ignore[operator]

    return Variant(at_places={evidence.op.place: run})
