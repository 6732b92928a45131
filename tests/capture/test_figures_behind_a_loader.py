"""What an evaluation adds up over the batches of a DataLoader is read behind the loop, after the last fetch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset
from watching import Watched

Guard = Callable[..., Watched]


def evaluate(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], floor: float) -> float:
    model.eval()
    total, count = torch.zeros(()), 0
    with torch.no_grad():
        for x, y in loader:
            share = model(x).softmax(-1).clamp(min=floor)
            total = total + F.nll_loss(torch.log(share), y, reduction="sum")
            count += len(y)
    model.train()
    return (total / count).item()


def train(floor: float) -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    x, y = torch.randn(24, 4), torch.randint(0, 3, (24,))
    x[17] = 1e4  # its probabilities are 0 and 1
    y[17] = (model(x[17]).argmax() + 1) % 3
    train_set, test_set = TensorDataset(x[:12], y[:12]), TensorDataset(x[12:], y[12:])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    figures = []
    for _ in range(2):
        for a, b in DataLoader(train_set, batch_size=4):
            optimizer.zero_grad()
            F.cross_entropy(model(a), b).backward()
            optimizer.step()
        figures.append(evaluate(model, DataLoader(test_set, batch_size=4), floor))
    return figures


def test_a_bad_figure_is_followed(guard: Guard) -> None:
    run = guard(lambda: train(0.0))
    assert run.result == [pytest.approx(float("inf"))] * 2
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.mode, run.first.step) == ("domain-error", "eval", 3)
    assert run.first.location is not None
    assert "torch.log(share)" in run.first.location.code


def test_a_good_figure_is_none(guard: Guard) -> None:
    run = guard(lambda: train(1e-6))
    assert not run.report.incidents
