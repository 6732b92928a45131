"""Rounding to bfloat16 that loses no small update: at random in proportion, or with the rest kept beside.

bfloat16 keeps 8 bits: added to a weight of 1.0, an update below 0.002 is lost every time. Rounded up as often as it is
large, it arrives on average; kept in a second bfloat16 tensor, it arrives once enough has gathered
(Zamirai et al., Revisiting BFloat16 Training, 2020).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ampguard.errors import UsageError

BLOCK = 1 << 16
"""Elements rounded at once on the CPU, so that they stay in the cache."""
_KEPT_BITS = -(1 << 16)


@torch.no_grad()
def stochastic_round_(target_bf16: Tensor, value_fp32: Tensor, generator: torch.Generator | None = None) -> None:
    """Write `value_fp32` into `target_bf16`, each element up or down so that its mean over many roundings is exact.

    Same shape, any strides. What bfloat16 can hold, Inf and NaN are written as they are. The random bits come from
    `generator`, of the same device, or from that device's own.
    """
    _refuse_types(target_bf16, value_fp32)
    if not value_fp32.is_cpu or not (target_bf16.is_contiguous() and value_fp32.is_contiguous()):
        target_bf16.copy_(_rounded(value_fp32, generator))
        return
    for target, value in zip(target_bf16.view(-1).split(BLOCK), value_fp32.view(-1).split(BLOCK), strict=True):
        target.copy_(_rounded(value, generator))


@torch.no_grad()
def compensated_round_(target_bf16: Tensor, rest_bf16: Tensor, value_fp32: Tensor) -> None:
    """Write `value_fp32` into `target_bf16`, to the nearest, and what that left over into `rest_bf16`.

    `joined(target, rest)` is the value again with 16 bits. Where the result is not finite the rest is 0.
    """
    _refuse_types(target_bf16, value_fp32)
    target_bf16.copy_(value_fp32)
    rest_bf16.copy_((value_fp32 - target_bf16).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))


def joined(target_bf16: Tensor, rest_bf16: Tensor) -> Tensor:
    """The float32 value that a tensor and its rest stand for, in a new tensor."""
    return target_bf16.detach().float().add_(rest_bf16)


def _rounded(value: Tensor, generator: torch.Generator | None) -> Tensor:
    """Float32 values of which the lower 16 bits are zero.

    A bfloat16 is the upper half of a float32. Uniform noise in the lower half carries into the upper one as often as
    the lower half is large, for either sign; cutting the rest off then rounds towards zero. Inf has nothing there, but a
    NaN may: it is taken as it was.
    """
    bits = _noise(value, generator).add_(value.view(torch.int32)).bitwise_and_(_KEPT_BITS)
    return torch.where(value.isnan(), value, bits.view(torch.float32))


def _noise(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Whole numbers of 0 to 65535 in int32: two of each random number of 32 bits."""
    count = like.numel()
    words = torch.empty((count + 1) // 2, dtype=torch.int32, device=like.device)
    words.random_(-(1 << 31), 1 << 31, generator=generator)
    halves = words.view(torch.int16)[:count].view(like.shape)
    return halves.to(torch.int32).bitwise_and_(0xFFFF)


def _refuse_types(target: Tensor, value: Tensor) -> None:
    if target.dtype is torch.bfloat16 and value.dtype is torch.float32:
        return
    raise UsageError(
        f"Only float32 values can be rounded so, and only into bfloat16; got {value.dtype} into {target.dtype}. "
        "Float16 needs float32 master weights instead (O2)."
    )
