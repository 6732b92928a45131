"""overflow: what is said of the operands is said of those that went into the value that is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Guard = Callable[..., Any]


def test_numbers_are_those_of_one_element(guard: Guard) -> None:
    """Another row's exponent is larger by far: its exponential is Inf in float64 too."""

    def script() -> None:
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for step in range(3):
            exponents = weight * torch.tensor([0.1, 100.0, 0.3, 1e30] if step == 1 else [0.1, 0.2, 0.3, 0.4])
            loss = torch.exp(exponents).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    first = guard(script).first
    assert (first.cause, first.step) == ("overflow", 1)
    operand, result = first.evidence["max_abs_operand"], first.evidence["result_fp64"]
    assert operand == pytest.approx(100.0, rel=0.05)
    assert result == pytest.approx(float(torch.tensor(operand, dtype=torch.float64).exp()), rel=0.01)
