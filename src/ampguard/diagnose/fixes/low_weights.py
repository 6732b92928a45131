"""How the weights of a model become bfloat16, or float32: whole, the parts that are of low precision, or tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ampguard import compat
from ampguard.capture.events.operands import leaves
from ampguard.capture.record import Held, Line, Ref, RootCall
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.fixes.standing_casts import modules_of
from ampguard.numerics import dtype_name, is_low_precision
from ampguard.replay.variables import attribute_path, expression_of

MOST_PARTS = 2
"""Parts of a model that are named one by one."""


def low_models(evidence: Evidence) -> list[nn.Module]:
    """The models that were called, or that a loss was given to call, with weights in low precision."""
    roots = [e for e in evidence.events() if isinstance(e, RootCall)]
    given = [leaf for r in roots for leaf in leaves((r.args, r.kwargs)) if isinstance(leaf, nn.Module)]
    found = {id(module): module for module in (*(root.module for root in roots), *given) if has_low_weights(module)}
    return list(found.values())


def has_low_weights(module: nn.Module) -> bool:
    return any(is_low_precision(p.dtype) for p in compat.all_parameters(module))


def weights_in(evidence: Evidence, casts: tuple[Line, ...]) -> tuple[str, str]:
    """How the models' weights become bfloat16, and float32; inputs that are whole numbers stay as they are.

    Where FSDP casts them before it computes, its policy says to what. `casts`: lines of the script that cast, which are told
    of beside it.
    """
    modules = low_models(evidence)
    policies = {policy for module in modules if (policy := compat.sharding_policy(module)) is not None}
    if policies:
        policy = min(policies)
        return f"{policy}(param_dtype=torch.bfloat16)", f"{policy}(param_dtype=torch.float32)"
    names = [expression_of(module) for module in modules]
    if not modules or None in names:
        modules, named = modules[:1], ["model"]
    else:
        named = [name for name in names if name is not None]
    roots = [e for e in evidence.events() if isinstance(e, RootCall) and has_low_weights(e.module)]
    inputs = ", its inputs too" if _takes_low_inputs(evidence, roots, casts) else ""
    bf16 = (
        "; ".join(_in_bfloat16(module, name) for module, name in zip(modules, named, strict=False))
        or "model.to(torch.bfloat16)"
    )
    return bf16 + inputs, "; ".join(f"{name}.float()" for name in named) + inputs


def beside_autocast(evidence: Evidence, casts: tuple[Line, ...]) -> tuple[str, str]:
    """What a change of autocast has to change besides, in bfloat16 and in float32, where weights or inputs are of low
    precision themselves: outside autocast nobody casts one of two types to the other."""
    if low_models(evidence):
        bf16, fp32 = weights_in(evidence, casts)
        return f", and {bf16}", f", and {fp32}"
    roots = [e for e in evidence.events() if isinstance(e, RootCall) and compat.has_parameters(e.module)]
    return "", ", its inputs in float32 too" if _takes_low_inputs(evidence, roots, casts) else ""


def widened_weights(evidence: Evidence, modules: set[int]) -> str:
    """Of modules (by identity) that are to compute in float32: those whose weights are of low precision, made float32."""
    known = {id(m): m for e in evidence.events() if isinstance(e, RootCall) for m in modules_of(e)}
    low = [known[i] for i in modules if i in known and has_low_weights(known[i])]
    names = [name for module in low if (name := expression_of(module)) is not None]
    return (
        "; ".join(f"{name}.float()" for name in sorted(names)) if len(names) == len(low) else "its weights in float32"
    )


def _in_bfloat16(module: nn.Module, name: str) -> str:
    """`net.to(torch.bfloat16)`; where other weights are float32, and stay that, only the parts that are not."""
    parts = list(_low_parts(module, ""))
    if len(parts) <= MOST_PARTS and None not in parts:
        return "; ".join(f"{attribute_path(name, part or '')}.to(torch.bfloat16)" for part in parts)
    low = next(dtype_name(p.dtype) for p in compat.all_parameters(module) if is_low_precision(p.dtype))
    return f"for p in {name}.parameters(): p.data = p.data.bfloat16() if p.dtype == torch.{low} else p.data"


def _low_parts(module: nn.Module, path: str) -> Iterator[str | None]:
    """The largest parts all of whose weights are of low precision; None for a weight that lies in none."""
    types = [p.dtype for p in compat.all_parameters(module) if p.is_floating_point()]
    if types and all(map(is_low_precision, types)):
        yield path
        return
    if any(is_low_precision(p.dtype) for p in compat.own_parameters(module)):
        yield None
    for name, part in compat.own_children(module).items():
        if has_low_weights(part):
            yield from _low_parts(part, f"{path}.{name}".lstrip("."))


def _takes_low_inputs(evidence: Evidence, roots: list[RootCall], casts: tuple[Line, ...]) -> bool:
    """Whether a model is given what is of low precision before any line casts it that is told of, or may be."""
    made = {
        (op.event, i): (op, out) for op in evidence.trace.ops if op.root is None for i, out in enumerate(op.outputs)
    }

    def is_low(leaf: Any) -> bool:
        if isinstance(leaf, Held):
            return is_low_precision(leaf.tensor.dtype)
        if not isinstance(leaf, Ref):
            return False
        op, out = made.get((leaf.event, leaf.output), (None, None))
        if op is not None and out is not None:
            return is_low_precision(out.dtype) and op.line not in casts
        value = evidence.made(leaf)
        return value is not None and is_low_precision(value.dtype)

    return any(is_low(leaf) for root in roots for leaf in leaves((root.args, root.kwargs)))
