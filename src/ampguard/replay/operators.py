"""What can be known of an ATen operator before it runs, and its arguments as plain lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ampguard import compat
from ampguard.numerics import UNINITIALISED

CASTS = frozenset({"_to_copy", "to", "clone", "detach", "alias", "lift_fresh", "lift_fresh_copy", "contiguous"})
NORMS = ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm")
RUNNING_STATISTICS: dict[str, tuple[int, ...]] = dict.fromkeys((*NORMS, "_batch_norm_with_update"), (3, 4))
"""Operators that write to operands although their schema does not say so, and to which."""
CONSTANT = frozenset(
    {"zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full"}
)
"""Operators whose result holds one number everywhere."""


@dataclass(frozen=True, slots=True)
class OperatorFacts:
    """An operator's schema, asked once.

    `name`: "bmm", "add" (also for `add_`): what is computed, not how it is stored; `full_name`: "aten.add_.Tensor".
    `writes`: positions of the arguments that it overwrites; `hidden_writes`: those that its schema does not confess.
    `views`: for each result, whether it is a view of an operand.
    """

    name: str
    full_name: str
    writes: tuple[int, ...]
    hidden_writes: tuple[int, ...]
    views: tuple[bool, ...]
    is_cast: bool
    is_uninitialised: bool
    is_collective: bool
    is_foreign: bool
    """Whether it is none of PyTorch's: declared by a script or a library."""
    allocates: bool
    """Whether the result is memory that is yet to be filled, as far as its operands are concerned."""

    def is_view(self, position: int) -> bool:
        views = self.views
        if position < len(views):
            return views[position]
        return bool(views) and views[-1]


_known: dict[int, tuple[OperatorFacts, Any]] = {}
"""By identity, each with its operator: PyTorch computes the hash of one in Python."""


def facts_of(func: Any) -> OperatorFacts:
    """The facts of an operator overload."""
    known = _known.get(id(func))
    if known is None:
        schema = compat.schema_of(func)
        name = schema.name.split("::")[-1].rstrip("_")
        facts = OperatorFacts(
            name=name,
            full_name=str(func),
            writes=tuple(
                i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
            ),
            hidden_writes=RUNNING_STATISTICS.get(name, ()),
            views=tuple(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns),
            is_cast=name in CASTS,
            is_uninitialised=name in UNINITIALISED,
            is_collective=func.namespace in ("c10d", "_c10d_functional"),
            is_foreign=func.namespace not in compat.PYTORCHS,
            allocates=name in UNINITIALISED or name in CONSTANT,
        )
        known = _known[id(func)] = facts, func
    return known[0]


def without_tensors(value: Any) -> Any:
    """An argument with None in place of every tensor."""
    if isinstance(value, Tensor):
        return None
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        return [without_tensors(item) for item in value]
    return value


def flat_tensors(args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensor operands of an operator, lists of tensors spread out."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


def operand_names(func: Any, args: Any, kwargs: dict[str, Any]) -> list[str]:
    """What the operator's schema calls each of `flat_tensors`."""
    declared = [argument.name for argument in compat.schema_of(func).arguments]
    given = (*zip(declared, args, strict=False), *kwargs.items())
    return [name for name, value in given for _ in flat_tensors((value,), {})]


def flat_scalars(args: Any, kwargs: dict[str, Any]) -> list[float]:
    """The plain numbers among an operator's arguments."""
    return [v for v in (*args, *kwargs.values()) if isinstance(v, (int, float)) and not isinstance(v, bool)]
