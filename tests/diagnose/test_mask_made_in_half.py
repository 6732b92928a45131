"""A mask constant that is -Inf from the moment it is made: it asks for the scores' own precision."""

from __future__ import annotations

import math
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
