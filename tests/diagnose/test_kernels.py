"""Operators that one of PyTorch's kernels gets wrong and another right."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

Guard = Callable[..., Any]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 3 * 64)
        self.out = nn.Linear(64, 3)

    def forward(self, x: Tensor, gain: float, mask: Tensor | None = None) -> Tensor:
        q, k, v = (t.unflatten(-1, (1, 64)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q * gain, k * gain, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(-2)).mean(1)


def attend(gain: float, mask: Tensor | None = None) -> None:
    """Queries times keys leave float32's range before they are scaled, and do not where each is scaled first."""
    torch.manual_seed(0)
    net = Attention()
    x = torch.randn(4, 5, 8)
    functional.cross_entropy(net(x, gain, mask), torch.tensor([0, 1, 2, 0])).backward()


def test_attention_kernel_that_multiplies_before_it_scales(guard: Guard) -> None:
    run = guard(lambda: attend(1.1e19))
    first = run.first
    assert run.faults == 0, run.stderr
    assert (first.cause, first.phase, first.module) == ("backend-fault", "forward", "")
    assert first.op.startswith("aten._scaled_dot_product_flash_attention_for_cpu")
    assert first.location.code.startswith("mixed = functional.scaled_dot_product_attention(")
    assert first.evidence["nonfinite"] > 0
    assert first.evidence["max_abs_other"] < 10
    assert [(fix.action, fix.verified) for fix in first.fixes] == [("change-backend", True)]
    assert "sdpa_kernel(SDPBackend.MATH)" in first.fixes[0].how


def test_bad_by_every_kernel_is_no_kernels_fault(guard: Guard) -> None:
    assert "backend-fault" not in guard(lambda: attend(1e25)).causes


def test_query_without_a_key_is_the_masks_doing(guard: Guard) -> None:
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    assert "backend-fault" not in guard(lambda: attend(1.1e19, mask)).causes


@pytest.fixture
def wrong_convolution() -> Iterator[None]:
    """oneDNN's convolution gives NaN for results above 3."""

    def wrong(x: Tensor, weight: Tensor, bias: Tensor, padding: Any, stride: Any, dilation: Any, groups: int) -> Tensor:
        right = torch.ops.aten.thnn_conv2d(x, weight, list(weight.shape[2:]), bias, stride, padding)
        return torch.where(right > 3.0, float("nan"), right)

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("mkldnn_convolution", wrong, "CPU")
    yield
    library._destroy()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
@pytest.mark.usefixtures("wrong_convolution")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_convolution_of_a_library(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 14 * 14, 2))
        for step in range(3):
            x = torch.randn(16, 3, 16, 16) * (0.5 if step < 2 else 6.0)
            net(x).square().mean().backward()

    run = guard(body)
    first = run.first
    assert run.faults == 0, run.stderr
    assert (first.cause, first.step, first.module, first.op) == ("backend-fault", 2, "0", "aten.convolution.default")
    assert [(fix.action, fix.verified) for fix in first.fixes] == [("change-backend", True)]
    assert torch.backends.mkldnn.enabled
