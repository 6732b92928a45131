"""An inference-mode region puts PyTorch's dispatch state back as it was at its beginning: the tape must not straddle it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ampguard


@pytest.mark.parametrize("max_incidents", [0, 5])
@pytest.mark.parametrize("region", [torch.inference_mode, torch.no_grad])
def test_evaluation_between_training_steps(tmp_path: Path, max_incidents: int, region: type) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampguard.watch(out=tmp_path / "run", max_incidents=max_incidents):
        for step in range(6):
            x = torch.randn(3, 4) / (0.0 if step == 2 else 1.0)
            loss = model(x).pow(2).mean()
            optimizer.zero_grad()
            if step != 2:
                loss.backward()
                optimizer.step()
            before = torch.ones(2) + step
            with region():
                assert model(before.repeat(2)).shape == (2,)
                inside = torch.ones(2) * 2
            assert float((torch.zeros(2) + inside.sum()).sum()) == 8.0
    assert float(torch.ones(2).sum()) == 2.0


def test_decorated_evaluation(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)

    @torch.inference_mode()
    def evaluate() -> float:
        return float(model(torch.ones(1, 4)).sum())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with ampguard.watch(out=tmp_path / "run"):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
            assert evaluate() == evaluate()
            assert float(torch.randn(3).mul(0).sum()) == 0.0
