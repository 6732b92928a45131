"""Adaptive clipping against its definition in the paper, unit by unit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ampguard.integrations.clipping import clip_


def clipped_unit(weight: Tensor, grad: Tensor, factor: float) -> Tensor:
    limit = factor * max(float(weight.norm()), 1e-3)
    return grad * min(1.0, limit / max(float(grad.norm()), 1e-6))


@pytest.mark.parametrize("shape", [(6, 3, 2, 2), (5, 7), (9,), ()])
@pytest.mark.parametrize("factor", [0.01, 10.0])
def test_each_unit_of_agc(shape: tuple[int, ...], factor: float) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(shape))
    if len(shape) > 1:
        parameter.data[0] = 0.0  # weights that begin at zero may learn
    parameter.grad = torch.randn(shape)
    before = parameter.grad.clone()
    clip_([parameter, nn.Parameter(torch.ones(2))], factor, "agc")
    if len(shape) < 2:
        expected = clipped_unit(parameter.detach(), before, factor)
    else:
        expected = torch.stack([clipped_unit(w, g, factor) for w, g in zip(parameter.detach(), before, strict=True)])
    assert torch.allclose(parameter.grad, expected, rtol=1e-5)
    assert torch.equal(parameter.grad, before) == (factor == 10.0 and len(shape) < 2)
