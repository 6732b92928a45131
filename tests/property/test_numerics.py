"""Facts about numbers, against PyTorch asked directly."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from ampguard.numerics import NAN, NEG_INF, POS_INF, fits, is_finite, kinds, stats
from ampguard.replay.trace import bad_elements, layout_of, storage_offsets

dtypes = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])
numbers = st.floats(width=32) | st.sampled_from([math.inf, -math.inf, math.nan, 0.0, -0.0, 65504.0, 65520.0, 3e38])


@given(st.lists(numbers, max_size=12), dtypes)
def test_is_finite(values: list[float], dtype: torch.dtype) -> None:
    tensor = torch.tensor(values, dtype=torch.float64).to(dtype)
    assert is_finite(tensor) == bool(torch.isfinite(tensor).all())
    assert is_finite(tensor.reshape(1, -1).t()) == bool(torch.isfinite(tensor).all())
    assert is_finite(torch.complex(tensor.float(), torch.zeros(len(values)))) == bool(
        torch.isfinite(tensor.float()).all()
    )


def test_large_finite_values_whose_sum_overflows_are_finite() -> None:
    assert is_finite(torch.full((64,), 3e38))
    assert is_finite(torch.full((64,), 60000.0, dtype=torch.float16))
    assert not is_finite(torch.tensor([math.inf, -math.inf]))


@given(numbers, dtypes)
def test_fits(value: float, dtype: torch.dtype) -> None:
    assert fits(value, dtype) == (math.isfinite(value) and math.isfinite(torch.tensor(value).to(dtype).item()))


@given(st.lists(numbers, min_size=1, max_size=12))
def test_kinds_and_stats(values: list[float]) -> None:
    tensor = torch.tensor(values)
    found = kinds(tensor).tolist()
    expected = [
        NAN if math.isnan(v) else POS_INF if v == math.inf else NEG_INF if v == -math.inf else 0 for v in values
    ]
    assert found == expected
    facts = stats(tensor)
    finite = [v for v in tensor.tolist() if math.isfinite(v)]
    assert (facts.nan, facts.pos_inf, facts.neg_inf) == tuple(expected.count(k) for k in (NAN, POS_INF, NEG_INF))
    assert facts.min == (min(finite) if finite else None)
    assert facts.max_abs == (max(map(abs, finite)) if finite else None)
    assert facts.finite_share == len(finite) / len(values)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_bad_elements_of_a_view_are_named_by_their_place_in_memory(shape: list[int], data: st.DataObject) -> None:
    base = torch.zeros([size + 1 for size in shape])
    marks = data.draw(st.lists(st.integers(0, base.numel() - 1), max_size=4))
    for mark in marks:
        base.view(-1)[mark] = math.nan
    view = base[tuple(slice(1, None) for _ in shape)].transpose(0, -1)
    found = bad_elements(view)
    expected = [int(i) for i in view.reshape(-1).isnan().nonzero()]
    if not expected:
        assert found is None
        return
    assert found is not None
    assert found.flat.tolist() == expected
    assert set(found.offsets.tolist()) <= set(marks)
    every = storage_offsets(view.shape, layout_of(view), torch.arange(view.numel()))
    assert torch.equal(base.view(-1)[every].isnan(), view.reshape(-1).isnan())
    assert all(found.position_of(o) == f for o, f in zip(found.offsets.tolist(), expected, strict=True))
