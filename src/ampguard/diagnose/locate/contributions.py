"""Which elements of its operands went into one element of an operator's result.

For the families below the answer is exact; for any other operator every element may have gone in. Positions are flat.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ampguard import compat
from ampguard.replay.operators import NORMS, RUNNING_STATISTICS
from ampguard.replay.trace import TracedOp

Rule = Callable[[TracedOp, int, int], Callable[[Tensor], Tensor] | None]

SAME_PLACE = frozenset(
    [
        "_to_copy",
        "clone",
        "copy",
        "lift_fresh",
        "lift_fresh_copy",
        "contiguous",
        "native_dropout",
        "_unsafe_view",
        "alias",
        "detach",
        "fill",
        "masked_fill",
        "where",
        "nan_to_num",
        "dropout",
        "softplus",
        "silu",
        "gelu",
        "hardtanh",
        "leaky_relu",
        "elu",
        "threshold",
        "glu_",
        "logit",
    ]
)
WRITTEN_INTO = frozenset(
    [
        "diagonal_scatter",
        "index_add",
        "index_copy",
        "index_fill",
        "index_put",
        "masked_scatter",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "select_scatter",
        "slice_scatter",
    ]
)
"""Operators that leave what they do not write of their first operand where it is."""
ROWS_AND_COLUMNS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "mv": 0, "dot": 0}
ALONG_ONE_DIM = frozenset(
    [
        "_softmax",
        "_log_softmax",
        "_safe_softmax",
        "cumsum",
        "cumprod",
        "logcumsumexp",
        "softmax",
        "log_softmax",
        "sort",
        "cummax",
        "cummin",
    ]
)
REDUCTIONS = frozenset(
    [
        "sum",
        "mean",
        "amax",
        "amin",
        "max",
        "min",
        "prod",
        "logsumexp",
        "var",
        "std",
        "var_mean",
        "std_mean",
        "norm",
        "linalg_vector_norm",
        "nansum",
        "any",
        "all",
        "argmax",
        "argmin",
        "median",
    ]
)
BY_SAMPLE = frozenset(
    ["convolution", "mkldnn_convolution", "native_group_norm", "max_pool2d_with_indices", "avg_pool2d"]
)
BATCH_NORMS = frozenset([*RUNNING_STATISTICS, *(f"{name}_backward" for name in NORMS)])


def contributing(op: TracedOp, operand: int, result: int, flat: int | None) -> Callable[[Tensor], Tensor] | None:
    """A test on flat positions of operand number `operand`: may it have gone into element `flat` of the result?

    None where every element may have.
    """
    if flat is None or operand >= len(op.inputs):
        return None
    name = op.short_name
    if not (op.inputs[operand].is_dense and op.outputs[result].is_dense):
        return None
    source, target = op.inputs[operand].shape, op.outputs[result].shape
    if source == () and target != ():
        return None
    if op.taken is not None and operand in (1, 2) and _is_left_out(op, operand, flat):
        return _nowhere
    if name == "stack":
        return _stack(op, operand, target, flat)
    if name == "cat":
        return _cat(op, operand, target, flat)
    if name in ROWS_AND_COLUMNS:
        return _matmul(op, operand, target, flat)
    if name in ALONG_ONE_DIM and source == target:
        return _match(source, coordinates(flat, target), free={_dim(op, len(source))})
    if name in REDUCTIONS:
        return _reduction(op, source, target, flat)
    if name in ("native_layer_norm", "_fused_rms_norm", "rms_norm") and result == 0 and source == target:
        kept = _normalized_from(op, source)
        return _match(source, coordinates(flat, target), free=set(range(kept, len(source))))
    if name in BY_SAMPLE and operand == 0 and source and target:
        place = coordinates(flat, target)
        return _match(source, [place[0]] + [None] * (len(source) - 1), free=set())
    if name in WRITTEN_INTO and operand == 0 and source == target:
        return _broadcast(source, target, flat)
    if name in BATCH_NORMS:
        return _batch_norm(op, operand, result, flat)
    if _is_pointwise(op, name):
        return _broadcast(source, target, flat)
    return None


def _nowhere(positions: Tensor) -> Tensor:
    return torch.zeros_like(positions, dtype=torch.bool)


def _is_left_out(op: TracedOp, operand: int, flat: int) -> bool:
    """Whether `torch.where` took this element from its other operand."""
    bad = op.outputs[0].bad
    if bad is None or op.taken is None:
        return False
    taken = op.taken[bad.flat == flat]
    return bool(taken.numel()) and bool(taken[0]) != (operand == 1)


def coordinates(flat: int, shape: tuple[int, ...]) -> list[int | None]:
    """A flat position as coordinates."""
    place: list[int | None] = []
    for size in reversed(shape):
        place.append(flat % size if size else 0)
        flat = flat // size if size else 0
    return place[::-1]


def _batch_norm(op: TracedOp, operand: int, result: int, flat: int) -> Callable[[Tensor], Tensor] | None:
    """Each channel is by itself. Running statistics are read in evaluation; in training each is written, and read for that."""
    source, target = op.inputs[operand], op.outputs[result]
    is_statistic = operand < len(op.operand_names) and op.operand_names[operand].startswith("running_")
    if is_statistic and _uses_the_batch(op) and source.storage != target.storage:
        return _nowhere
    channels, wanted = (shape[1 if len(shape) > 1 else 0] for shape in (source.shape, target.shape))
    if channels != wanted:
        return None
    place: list[int | None] = [None] * len(source.shape)
    place[1 if len(place) > 1 else 0] = coordinates(flat, target.shape)[1 if len(target.shape) > 1 else 0]
    return _match(source.shape, place, free=set())


def _uses_the_batch(op: TracedOp) -> bool:
    """Whether a BatchNorm takes mean and variance from its batch: it says so, or is of a kind that does nothing else."""
    told = [argument(op, name) for name in ("training", "train", "update")]
    return next((bool(value) for value in told if value is not None), True)


def _is_pointwise(op: TracedOp, name: str) -> bool:
    return name in SAME_PLACE or torch.Tag.pointwise in getattr(op.func, "tags", ())


def _match(shape: tuple[int, ...], place: list[int | None], free: set[int]) -> Callable[[Tensor], Tensor]:
    """A test that a flat position of `shape` has the coordinates `place`, except along the dims in `free`."""

    groups = _groups(shape, place, free)

    def test(positions: Tensor) -> Tensor:
        keep, rest = None, positions
        for number, (size, wanted) in enumerate(groups):
            is_last = number == len(groups) - 1
            if wanted is not None:
                is_there = (rest if is_last else rest % size) == wanted
                keep = is_there if keep is None else keep & is_there
            if not is_last:
                rest = rest // size
        return torch.ones_like(positions, dtype=torch.bool) if keep is None else keep

    return test


def _groups(shape: tuple[int, ...], place: list[int | None], free: set[int]) -> list[tuple[int, int | None]]:
    """Neighbouring dims that are asked about alike, as one: sizes and coordinates (None: any), the last dim first."""
    groups: list[tuple[int, int | None]] = []
    for dim in range(len(shape) - 1, -1, -1):
        size = max(shape[dim], 1)
        if size == 1:
            continue
        wanted = None if dim in free else place[dim]
        before, inner = groups[-1] if groups else (1, None)
        if groups and wanted is None and inner is None:
            groups[-1] = (before * size, None)
        elif groups and wanted is not None and inner is not None:
            groups[-1] = (before * size, wanted * before + inner)
        else:
            groups.append((size, wanted))
    return groups


def _broadcast(source: tuple[int, ...], target: tuple[int, ...], flat: int) -> Callable[[Tensor], Tensor] | None:
    if len(source) > len(target):
        return None
    place = coordinates(flat, target)[len(target) - len(source) :]
    if any(s not in (1, t) for s, t in zip(source, target[len(target) - len(source) :], strict=True)):
        return None
    return _match(source, place, free=set())


def _matmul(op: TracedOp, operand: int, target: tuple[int, ...], flat: int) -> Callable[[Tensor], Tensor] | None:
    first = ROWS_AND_COLUMNS[op.short_name]
    source = op.inputs[operand].shape
    place = coordinates(flat, target)
    if operand < first:
        return _broadcast(source, target, flat)
    if len(target) < 2 or len(source) != len(target):
        return None
    if operand == first:
        return _match(source, place, free={len(source) - 1})
    return _match(source, place, free={len(source) - 2})


def _reduction(
    op: TracedOp, source: tuple[int, ...], target: tuple[int, ...], flat: int
) -> Callable[[Tensor], Tensor] | None:
    dims = _reduced_dims(op, source, target)
    if dims is None or len(dims) == len(source):
        return None
    kept = [d for d in range(len(source)) if d not in dims]
    place = coordinates(flat, target)
    if len(target) == len(source):
        wanted: list[int | None] = place
    elif len(target) == len(kept):
        wanted = [None] * len(source)
        for dim, value in zip(kept, place, strict=True):
            wanted[dim] = value
    else:
        return None
    return _match(source, wanted, free=set(dims))


def reached_by(op: TracedOp, operand: int, result: int, positions: Tensor) -> Tensor | None:
    """The elements of a result that elements of an operand went into, where that is one for each: reductions."""
    source, target = op.inputs[operand].shape, op.outputs[result].shape
    dims = _reduced_dims(op, source, target) if op.short_name in REDUCTIONS else None
    if dims is None or math.prod(target) != math.prod(size for dim, size in enumerate(source) if dim not in dims):
        return None
    reached, step, rest = torch.zeros_like(positions), 1, positions
    for dim in range(len(source) - 1, -1, -1):
        if dim not in dims:
            reached = reached + rest % source[dim] * step
            step *= source[dim]
        rest = rest // source[dim]
    return reached


def _reduced_dims(op: TracedOp, source: tuple[int, ...], target: tuple[int, ...]) -> set[int] | None:
    if math.prod(target) == 1 and math.prod(source) != 1:
        return set(range(len(source)))
    value = argument(op, "dim")
    if isinstance(value, int) and not isinstance(value, bool):
        return {value % len(source)} if source else None
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, int) for v in value):
        return {v % len(source) for v in value}
    return None


def argument(op: TracedOp, name: str) -> object:
    """The value of an argument by its name in the operator's schema; None where it was not given."""
    for position, declared in enumerate(compat.schema_of(op.func).arguments):
        if declared.name == name:
            return op.plain[position] if position < len(op.plain) else op.plain_kwargs.get(name)
    return None


def _dim(op: TracedOp, rank: int) -> int:
    args = op.plain
    value = args[1] if len(args) > 1 else op.plain_kwargs.get("dim", rank - 1)
    return value % rank if isinstance(value, int) else rank - 1


def _normalized_from(op: TracedOp, source: tuple[int, ...]) -> int:
    args = op.plain
    shape = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else source[-1:]
    return len(source) - len(shape)


def _stack(op: TracedOp, operand: int, target: tuple[int, ...], flat: int) -> Callable[[Tensor], Tensor]:
    args = op.plain
    dim = (args[1] if len(args) > 1 else op.plain_kwargs.get("dim", 0)) % max(len(target), 1)
    place = coordinates(flat, target)
    if place[dim] != operand:
        return _nowhere
    return _match(op.inputs[operand].shape, place[:dim] + place[dim + 1 :], free=set())


def _cat(op: TracedOp, operand: int, target: tuple[int, ...], flat: int) -> Callable[[Tensor], Tensor] | None:
    args = op.plain
    dim = (args[1] if len(args) > 1 else op.plain_kwargs.get("dim", 0)) % max(len(target), 1)
    place = coordinates(flat, target)
    start = 0
    for position in range(operand):
        shape = op.inputs[position].shape
        start += shape[dim] if len(shape) == len(target) else 0
    source = op.inputs[operand].shape
    if len(source) != len(target):
        return None
    inside = (place[dim] or 0) - start
    if not 0 <= inside < source[dim]:
        return _nowhere
    place[dim] = inside
    return _match(source, place, free=set())
