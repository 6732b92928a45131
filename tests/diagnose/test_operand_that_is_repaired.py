"""What is told to be repaired is the operand that holds NaN, as the line writes it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from watching import Watched

Guard = Callable[..., Watched]


class Normalizer:
    """Its statistics come from a file: NumPy's, with NaN where a feature was constant."""

    def __init__(self) -> None:
        self.table = {"std": [1.0, float("nan"), 1.0, 1.0]}

    def __call__(self, x: Tensor) -> Tensor:
        std = np.asarray(self.table["std"], dtype=np.float32)
        return (x - 0.1) / (torch.from_numpy(std) + 1e-6)


def trained() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    normalize = Normalizer()
    for _ in range(2):
        loss = model(normalize(torch.randn(8, 4))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_the_operand_is_named_as_it_is_written(guard: Guard) -> None:
    first = guard(trained).first
    assert first.cause == "nonfinite-input"
    fix = next(fix for fix in first.fixes if fix.action == "fix-data")
    assert "torch.nan_to_num(x)" not in fix.how
    assert "torch.nan_to_num(torch.from_numpy(std))" in fix.how
