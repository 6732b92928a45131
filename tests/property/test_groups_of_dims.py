"""Which elements share coordinates with another is asked of whole groups of dims; the answer is that of each dim by itself."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from ampguard.diagnose.locate.contributions import _match


@given(st.data())
def test_as_dim_by_dim(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=5), label="shape"))
    place = [data.draw(st.one_of(st.none(), st.integers(0, size - 1)), label="coordinate") for size in shape]
    free = set(data.draw(st.lists(st.integers(0, 4), max_size=3), label="free"))
    positions = torch.arange(math.prod(shape))
    expected = torch.ones(shape, dtype=torch.bool)
    for dim, (size, wanted) in enumerate(zip(shape, place, strict=True)):
        if dim not in free and wanted is not None:
            along = (torch.arange(size) == wanted).reshape([-1 if d == dim else 1 for d in range(len(shape))])
            expected &= along
    assert torch.equal(_match(shape, place, free)(positions), expected.reshape(-1))
