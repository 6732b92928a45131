"""Norm and finiteness of gradients against float64, whatever their type, size, place in memory and device."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ampguard.engine.step import check_gradients
from ampguard.engine.step.gradients import GradientCheck, _on_device
from ampguard.engine.step.squares import BLOCK, SMALL, sum_of_squares


def holders(gradients: list[Tensor | None]) -> list[Tensor]:
    """Parameters that hold these gradients."""
    held = []
    for gradient in gradients:
        p = nn.Parameter(torch.zeros(1) if gradient is None else torch.zeros(gradient.shape, dtype=gradient.dtype))
        p.grad = gradient
        held.append(p)
    return held


def both(gradients: list[Tensor], scale: float | None = None) -> list[GradientCheck]:
    """The answer for the CPU, and the one that would be given on an accelerator."""
    factor = None if scale is None else torch.tensor(scale)
    return [check_gradients(holders(list(gradients)), factor), _on_device(gradients, factor)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [0, 1, SMALL, SMALL + 1, BLOCK + 7, 3_000_000])
def test_norm_against_float64(dtype: torch.dtype, size: int) -> None:
    gradient = (torch.randn(size, generator=torch.Generator().manual_seed(size)) * 3).to(dtype)
    for check, digits in zip(both([gradient, torch.ones(3, dtype=dtype)], 8.0), (1e-5, 2e-4), strict=True):
        truth = math.hypot(gradient.double().norm().item(), math.sqrt(3)) / 8
        assert check.norm.item() == pytest.approx(truth, rel=digits)
        assert check.found_inf.item() == 0.0
        assert check.inverse_scale.item() == 0.125
        assert {t.dtype for t in (check.norm, check.found_inf, check.inverse_scale)} == {torch.float32}
        assert check.norm.dim() == check.found_inf.dim() == check.inverse_scale.dim() == 0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64], ids=str)
@pytest.mark.parametrize("size", [4, BLOCK * 2])
def test_one_bad_element_is_enough(bad: float, dtype: torch.dtype, size: int) -> None:
    gradients = [torch.ones(5, 5), torch.ones(size, dtype=dtype), torch.ones(3)]
    gradients[1][size // 2] = bad
    for check in both(gradients, 1024.0):
        assert check.found_inf.item() == 1.0
        assert not check.norm.isfinite()


def test_nan_and_inf_are_told_apart() -> None:
    for check in both([torch.tensor([math.inf, 1.0])]):
        assert check.norm.item() == math.inf
    for check in both([torch.tensor([math.nan, math.inf])]):
        assert math.isnan(check.norm.item())


@pytest.mark.parametrize(
    "gradients",
    [
        [torch.full((100_000,), 60_000.0, dtype=torch.float16)],
        [torch.full((8,), 1e30), torch.ones(3)],
        [torch.full((10_000,), 2e38)],
        [torch.full((10_000,), 1e38, dtype=torch.bfloat16)],
        [torch.full((8,), 1e30, dtype=torch.complex64)],
    ],
    ids=["float16", "float32", "large float32", "bfloat16", "complex"],
)
def test_a_sum_of_squares_that_overflows_is_no_inf(gradients: list[Tensor]) -> None:
    """PyTorch's unscale_ finds nothing in such gradients, so neither must we."""
    for check in both(gradients, 2.0**40):
        wide = [g.to(torch.complex128 if g.is_complex() else torch.float64) for g in gradients]
        truth = math.sqrt(sum(g.abs().square().sum().item() for g in wide)) / 2.0**40
        assert check.found_inf.item() == 0.0
        assert check.norm.item() == pytest.approx(truth, rel=1e-4)  # PyTorch's own norm of equal numbers is no nearer


def test_a_norm_beyond_float32() -> None:
    for check in both([torch.full((100,), 3e38)]):
        assert check.found_inf.item() == 0.0
        assert check.norm.item() == math.inf
    check = check_gradients(holders([torch.full((100,), 1e300, dtype=torch.float64)]))
    assert (check.found_inf.item(), check.norm.item()) == (0.0, math.inf)


def test_many_small_tensors_of_two_types() -> None:
    gradients = [torch.full((4, 4), 0.5, dtype=dtype) for dtype in (torch.float32, torch.bfloat16) for _ in range(30)]
    for check in both(gradients):
        assert check.norm.item() == pytest.approx(math.sqrt(60 * 16 * 0.25))


@pytest.mark.parametrize("numel", [12, SMALL * 3])
def test_layouts(numel: int) -> None:
    base = torch.randn(numel // 3, 3, generator=torch.Generator().manual_seed(0))
    truth = base.double().norm().item()
    spread = torch.zeros(numel // 3, 6)[:, ::2].copy_(base)
    image = base.reshape(1, 3, numel // 3, 1).to(memory_format=torch.channels_last)
    for gradient in (base, base.t(), spread, image):
        assert check_gradients(holders([gradient])).norm.item() == pytest.approx(truth, rel=1e-5)
    expanded = torch.tensor(2.0).expand(numel)
    assert sum_of_squares([expanded]) == 4.0 * numel


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_adds_up_what_belongs_to_one_place() -> None:
    gradient = torch.sparse_coo_tensor(torch.tensor([[0, 2, 0]]), torch.tensor([1.0, 2.0, 3.0]), (4,))
    for check in both([gradient, torch.tensor([1.0])]):
        assert check.norm.item() == pytest.approx(math.sqrt(16 + 4 + 1))
    assert not gradient.is_coalesced()  # the gradient itself is left as it was
    huge = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([3e38, 3e38]), (4,))
    assert check_gradients(holders([huge])).found_inf.item() == 1.0


def test_without_gradients() -> None:
    check = check_gradients(holders([None]), torch.tensor(4.0))
    assert (check.norm.item(), check.found_inf.item(), check.inverse_scale.item()) == (0.0, 0.0, 0.25)


def test_parameters_may_be_a_generator_and_gradients_stay_as_they_are() -> None:
    gradients: list[Tensor | None] = [torch.randn(5), None, torch.randn(SMALL * 2)]
    held = holders(gradients)
    versions = [g._version for g in gradients if g is not None]
    check = check_gradients(p for p in held)
    assert [g._version for g in gradients if g is not None] == versions
    assert not check.norm.requires_grad


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=20),
    pieces=st.integers(1, 4),
)
def test_any_values(values: list[float], pieces: int) -> None:
    """Finite where every value is; then both answers are float64's norm."""
    gradients = [torch.tensor(part) for part in (values[i::pieces] for i in range(pieces)) if part]
    is_finite = all(map(math.isfinite, values))
    truth = torch.tensor(values, dtype=torch.float64).norm().float()
    for check in both(gradients):
        assert check.found_inf.item() == (0.0 if is_finite else 1.0)
        if is_finite:
            torch.testing.assert_close(check.norm, truth, rtol=1e-5, atol=1e-19)
