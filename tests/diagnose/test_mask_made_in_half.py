"""A mask constant that is -Inf from the moment it is made: it asks for the scores' own precision."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


class Attention(nn.Module):
    def __init__(self, constant: float) -> None:
        super().__init__()
        self.qk = nn.Linear(4, 16)
        self.constant = constant

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        q, k = self.qk(x).chunk(2, -1)
        scores = q @ k.mT
        scores = torch.where(pad[:, None, :], torch.tensor(self.constant, dtype=scores.dtype), scores)
        return scores.softmax(-1) @ x


@pytest.mark.parametrize(("constant", "cause"), [(-1e9, "mask-overflow"), (-math.inf, "masked-softmax")])
def test_only_a_number_that_float32_has_overflowed(constant: float, cause: str, guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net, pad = Attention(constant), torch.zeros(3, 5, dtype=torch.bool)
        pad[1] = True
        with torch.autocast("cpu", dtype=torch.float16):
            loss = net(torch.randn(3, 5, 4), pad).float().pow(2).mean()
        loss.backward()

    incident = guard(body).first
    assert (incident.cause, incident.module) == (cause, "")
    if cause == "mask-overflow":
        assert incident.evidence["constant"] == -1e9
        assert "torch.tensor(self.constant" in incident.location.code
        assert (incident.fixes[0].action, incident.fixes[0].verified) == ("mask-value", True)


class Biased(nn.Module):
    """An additive mask that was made in float32 and is cast where it is added."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.qk = nn.Linear(4, 16)
        self.way = way

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k = self.qk(x).chunk(2, -1)
        scores = q @ k.mT
        if self.way == "to":
            scores = scores + bias[:, None].to(scores.dtype)
        else:
            scores += bias[:, None].type_as(scores)
        return scores.softmax(-1) @ x


@pytest.mark.parametrize(
    ("way", "line"),
    [
        ("to", "scores = scores + bias[:, None].to(scores.dtype).clamp(min=torch.finfo(torch.float16).min)"),
        ("type_as", "scores += bias[:, None].type_as(scores).clamp(min=torch.finfo(torch.float16).min)"),
    ],
)
def test_mask_that_is_cast_where_it_is_added(way: str, line: str, guard: Guard) -> None:
    """The printed line is the script's own with the bound in it."""

    def body() -> None:
        torch.manual_seed(0)
        net, bias = Biased(way), torch.zeros(3, 5)
        bias[1] = -1e9
        with torch.autocast("cpu", dtype=torch.float16):
            loss = net(torch.randn(3, 5, 4), bias).float().pow(2).mean()
        loss.backward()

    incident = guard(body).first
    assert (incident.cause, incident.op) == ("mask-overflow", "aten._to_copy.default")
    assert (incident.fixes[0].action, incident.fixes[0].verified) == ("mask-value", True)
    assert incident.fixes[0].how.endswith(f": {line}")


def summed(out: Tensor, y: Tensor) -> Tensor: return ((out - y.half()) ** 2).sum()  # fmt: skip


def test_a_function_of_one_line_is_printed_without_its_head(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(4, 64)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = summed(net(torch.randn(16, 4)), torch.full((16, 64), 30.0))
        loss.backward()

    incident = guard(body).first
    assert incident.cause == "fp16-overflow"
    assert all("def " not in fix.how for fix in incident.fixes)
    assert any("return ((out - y.half()) ** 2).sum()" in fix.how for fix in incident.fixes)


def test_a_constant_that_the_device_does_not_convert(guard: Guard) -> None:
    """`torch.where(keep, half, -1e9)`: the constant is -Inf on a CPU; a CUDA device refuses to make it, as done here."""

    def made(value: float, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        if dtype == torch.float16 and abs(value) > 65504 and math.isfinite(value):
            raise RuntimeError("value cannot be converted to type c10::Half without overflow")
        return torch.full((), value, dtype=dtype)

    def body() -> None:
        torch.manual_seed(0)
        qk = nn.Linear(4, 16)
        x, keep = torch.randn(3, 5, 4), torch.ones(3, 1, 5, dtype=torch.bool)
        with torch.autocast("cpu", dtype=torch.float16):
            q, k = qk(x).chunk(2, -1)
            with pytest.raises(RuntimeError, match="without overflow"):
                torch.where(keep, q @ k.mT, -1e9).softmax(-1).sum().backward()

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("scalar_tensor", made, "CPU")
    try:
        incident = guard(body).first
    finally:
        library._destroy()
    assert (incident.cause, incident.op) == ("mask-overflow", "aten.scalar_tensor.default")
    assert incident.evidence["constant"] == -1e9
    assert (incident.fixes[0].action, incident.fixes[0].verified) == ("mask-value", True)
