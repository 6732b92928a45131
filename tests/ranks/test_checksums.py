"""The sum of a tensor's bits: exact, the same in any order, another one for any change; and its way through float32."""

from __future__ import annotations

import pytest
import torch

from ampguard.capture.ranks.checksums import as_parts, digest_of, from_parts
from ampguard.numerics import bit_sum

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16, 8), (3, 5), (1,), ()])
def test_any_change_of_one_element_changes_it(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensor = (torch.randn(shape) * 50).abs().to(dtype)
    before = int(bit_sum(tensor))
    assert before == int(bit_sum(tensor.clone())) == int(bit_sum(tensor.flip(0) if shape else tensor))
    for position in range(tensor.numel()):
        other = tensor.clone()
        flat = other.view(-1)
        is_number = dtype.is_floating_point or dtype.is_complex
        flat[position] = -flat[position] if is_number else flat[position] + 1  # of a float one single bit, also of 0
        assert int(bit_sum(other)) != before


def test_views_and_empty_tensors() -> None:
    whole = torch.randn(6, 7)
    for view in (whole.t(), whole[:, 1:4], whole[1:], whole[::2, ::3], whole.flatten()[1:-1]):
        assert int(bit_sum(view)) == int(bit_sum(view.contiguous()))
    assert int(bit_sum(torch.empty(0))) == 0
    assert int(bit_sum(torch.empty(3, device="meta"))) == 0


def test_parts_hold_all_64_bits() -> None:
    numbers = [0, 1, -1, 2**63 - 1, -(2**63), 123456789012345678, -987654321098765432]
    parts = as_parts([torch.tensor(n) for n in numbers])
    assert all(float(torch.tensor(float(p), dtype=torch.float32)) == float(p) for p in parts)
    assert from_parts([float(p) for p in parts]) == [n % 2**64 for n in numbers]
    assert digest_of(from_parts([float(p) for p in parts])) != digest_of([0] * len(numbers))
