"""Which elements go into a result's element, checked against the operator itself.

Safe: what `contributing` leaves out may be anything (NaN, another number) and the element stays as it is.
Tight, for the families that are exact: each element that it keeps turns the result's element into NaN when it is NaN.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ampguard.diagnose.locate.contributions import contributing, coordinates
from ampguard.replay.operators import facts_of, flat_scalars, flat_tensors, without_tensors
from ampguard.replay.trace import TracedOp, traced

aten = torch.ops.aten
sizes = st.integers(1, 4)
seeds = st.integers(0, 2**16)


def operands(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(shape, generator=generator) + 0.5 for shape in shapes]


def results(output: Any) -> list[Tensor]:
    return list(output) if isinstance(output, (tuple, list)) else [output]


def traced_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedOp:
    op = TracedOp(0, 0, func, facts_of(func).name, None, None, None)
    op.inputs = [traced(t) for t in flat_tensors(args, kwargs)]
    op.outputs = [traced(t) for t in results(func(*args, **kwargs))]
    op.scalars = flat_scalars(args, kwargs)
    op.plain = tuple(without_tensors(a) for a in args)
    op.plain_kwargs = {k: without_tensors(v) for k, v in kwargs.items()}
    return op


def with_operand(tree: Any, target: Tensor, new: Tensor) -> Any:
    if isinstance(tree, (list, tuple)):
        return type(tree)(with_operand(item, target, new) for item in tree)
    return new if tree is target else tree


def same(a: Tensor, b: Tensor) -> bool:
    return bool((a == b) | (a.isnan() & b.isnan()))


def check(func: Any, *args: Any, result: int = 0, tight: bool = True, known: bool = True, **kwargs: Any) -> None:
    """Safe for every operand and every element of the result; tight where asked for."""
    op = traced_call(func, args, kwargs)
    before = results(func(*args, **kwargs))[result]
    for number, operand in enumerate(flat_tensors(args, kwargs)):
        if not operand.is_floating_point():
            continue
        positions = torch.arange(operand.numel())
        for flat in range(before.numel()):
            test = contributing(op, number, result, flat)
            if test is None:
                assert not known, f"operand {number} of {func} should be followed element by element"
                continue
            kept = test(positions)
            for value in (float("nan"), 77.0):
                other = operand.clone()
                other.view(-1)[~kept] = value
                after = results(func(*with_operand(args, operand, other), **kwargs))[result]
                assert same(after.reshape(-1)[flat], before.reshape(-1)[flat]), (func, number, flat, kept)
            for position in positions[kept] if tight else ():
                other = operand.clone()
                other.view(-1)[position] = float("nan")
                after = results(func(*with_operand(args, operand, other), **kwargs))[result]
                assert after.reshape(-1)[flat].isnan(), (func, number, flat, position)


@st.composite
def broadcastable(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    full = tuple(draw(st.lists(sizes, min_size=1, max_size=3)))
    other = tuple(size if draw(st.booleans()) else 1 for size in full)[draw(st.integers(0, len(full) - 1)) :]
    return full, other


@given(
    broadcastable(), seeds, st.sampled_from([aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Tensor])
)
def test_pointwise_with_broadcasting(shapes: Any, seed: int, func: Any) -> None:
    a, b = operands(seed, *shapes)
    check(func, a, b)
    check(func, b, a, known=shapes[0] == shapes[1] or b.dim() == a.dim())


@given(broadcastable(), seeds)
def test_where_and_masked_fill(shapes: Any, seed: int) -> None:
    a, b = operands(seed, *shapes)
    chosen = a > 1.0
    check(aten.where.self, chosen, a, b, tight=False)
    check(aten.masked_fill.Scalar, a, chosen, -1.0, tight=False)


@given(st.lists(sizes, min_size=1, max_size=3), seeds)
def test_functions_of_one_operand(shape: list[int], seed: int) -> None:
    (a,) = operands(seed, tuple(shape))
    for func in (aten.exp.default, aten.log.default, aten.sigmoid.default, aten.neg.default, aten.clone.default):
        check(func, a)
    check(aten._to_copy.default, a, dtype=torch.float64)
    check(aten.clamp.default, a, 0.6, 1.2)


@given(sizes, sizes, sizes, sizes, seeds)
def test_products_of_matrices(b: int, n: int, k: int, m: int, seed: int) -> None:
    x, y, bias, row = operands(seed, (n, k), (k, m), (n, m), (m,))
    check(aten.mm.default, x, y)
    check(aten.addmm.default, bias, x, y)
    check(aten.addmm.default, row, x, y)
    xs, ys, biases = operands(seed, (b, n, k), (b, k, m), (b, n, m))
    check(aten.bmm.default, xs, ys)
    check(aten.baddbmm.default, biases, xs, ys)
    check(aten.mv.default, x, operands(seed, (k,))[0], known=False)


@st.composite
def parts(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], int]:
    rank = draw(st.integers(1, 3))
    dim = draw(st.integers(-rank, rank - 1))
    shape = [draw(sizes) for _ in range(rank)]
    made = []
    for _ in range(draw(st.integers(1, 3))):
        part = list(shape)
        part[dim] = draw(sizes)
        made.append(tuple(part))
    return made, dim


@given(parts(), seeds)
def test_cat_and_stack(spec: Any, seed: int) -> None:
    shapes, dim = spec
    check(aten.cat.default, operands(seed, *shapes), dim)
    check(aten.stack.default, operands(seed, *[shapes[0]] * 3), dim)


@given(st.lists(sizes, min_size=1, max_size=3), st.integers(-3, 2), seeds)
def test_along_one_dimension(shape: list[int], dim: int, seed: int) -> None:
    dim = dim % len(shape) - (len(shape) if dim < 0 else 0)
    (a,) = operands(seed, tuple(shape))
    check(aten._softmax.default, a, dim, False)
    check(aten._log_softmax.default, a, dim, False)
    check(aten.cumsum.default, a, dim, tight=False)
    check(aten.sort.default, a, dim, tight=False)


@given(st.lists(sizes, min_size=1, max_size=3), st.data(), st.booleans(), seeds)
def test_reductions(shape: list[int], data: st.DataObject, keepdim: bool, seed: int) -> None:
    rank = len(shape)
    dims = data.draw(st.lists(st.integers(-rank, rank - 1), min_size=1, max_size=rank, unique_by=lambda d: d % rank))
    (a,) = operands(seed, tuple(shape))
    everything = {d % rank for d in dims} == set(range(rank)) or torch.Size(shape).numel() == 1
    for func in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.logsumexp.default):
        check(func, a, dims, keepdim, known=not everything and func(a, dims, keepdim).numel() != 1)
    check(aten.var.correction, a, dims, correction=0, keepdim=keepdim, known=False)
    check(aten.max.dim, a, dims[0], keepdim, known=False)
    check(aten.argmax.default, a, dims[0], keepdim, known=False, tight=False)
    check(aten.prod.dim_int, a, dims[0], keepdim, known=False)
    check(aten.linalg_vector_norm.default, a, 3.0, dims, keepdim, known=False)
    check(aten.sum.default, a, known=False)


@pytest.mark.parametrize(("shape", "order", "dims"), [((2, 3), 1, [0]), ((2, 3, 2), 2, [1]), ((2, 2, 2), 3, [2])])
def test_norm_with_a_whole_order(shape: tuple[int, ...], order: int, dims: list[int]) -> None:
    (a,) = operands(0, shape)
    check(aten.linalg_vector_norm.default, a, order, dims)


@given(sizes, sizes, st.integers(2, 4), seeds)
def test_layer_norm(b: int, n: int, d: int, seed: int) -> None:
    a, weight, bias = operands(seed, (b, n, d), (d,), (d,))
    check(aten.native_layer_norm.default, a, [d], weight, bias, 1e-5, known=False, tight=False)
    check(aten.native_layer_norm.default, a, [n, d], None, None, 1e-5, known=False, tight=False)


@pytest.mark.slow
@given(st.integers(2, 3), st.sampled_from([1, 2]), seeds)
def test_by_sample(b: int, groups: int, seed: int) -> None:
    image, weight, bias = operands(seed, (b, 2, 4, 4), (2, 2 // groups, 3, 3), (2,))
    conv = (image, weight, bias, [1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    check(aten.convolution.default, *conv, known=False, tight=False)
    check(aten.max_pool2d_with_indices.default, image, [2, 2], known=False, tight=False)
    check(aten.avg_pool2d.default, image, [2, 2], known=False, tight=False)
    check(aten.native_group_norm.default, image, None, None, b, 2, 16, groups, 1e-5, known=False, tight=False)


@given(st.lists(sizes, min_size=1, max_size=4))
def test_coordinates_are_those_of_unravel(shape: list[int]) -> None:
    count = torch.Size(shape).numel()
    for flat in range(count):
        expected = [int(c) for c in torch.unravel_index(torch.tensor(flat), shape)]
        assert coordinates(flat, tuple(shape)) == expected


@given(seeds, sizes, sizes, st.data())
def test_what_is_written_into_a_tensor_leaves_the_rest_where_it_is(seed: int, n: int, m: int, data: Any) -> None:
    x, y = operands(seed, (n, m), (1, m))
    at = data.draw(st.integers(0, n - 1))
    row, rows = torch.tensor([at]), torch.full((1, m), at)
    is_row = (torch.arange(n) == at).unsqueeze(1)
    check(aten.index_fill.int_Scalar, x, 0, row, 2.0, tight=False)
    check(aten.index_put.default, x, [row], y, tight=False, known=False)
    check(aten.index_put.default, x, [row], y, True, tight=False, known=False)
    check(aten.index_add.default, x, 0, row, y, tight=False, known=False)
    check(aten.index_copy.default, x, 0, row, y, tight=False, known=False)
    check(aten.scatter.src, x, 0, rows, y, tight=False, known=False)
    check(aten.scatter_add.default, x, 0, rows, y, tight=False, known=False)
    check(aten.scatter_reduce.two, x, 0, rows, y, "amax", tight=False, known=False)
    check(aten.select_scatter.default, x, y[0], 0, at, tight=False, known=False)
    check(aten.slice_scatter.default, x, y, 0, at, at + 1, tight=False, known=False)
    check(aten.masked_scatter.default, x, is_row.expand(n, m), y, tight=False, known=False)
