"""Gradients that cancel to 0 and that float32 has only as its own rounding are no loss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from watching import Watched, seed_everything

Guard = Callable[..., Watched]


class TwoTowers(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 16))
        self.text = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 16))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        return functional.normalize(self.image(image), dim=-1) @ functional.normalize(self.text(text), dim=-1).T


def contrast(
    image: Callable[[], Tensor], text: Callable[[], Tensor], weight: float, dropout: float
) -> Callable[[], None]:
    """A contrastive training in float16 autocast with a loss scale of 1."""

    def train() -> None:
        seed_everything()
        towers = TwoTowers(dropout)
        optimizer = torch.optim.SGD(towers.parameters(), lr=0.1)
        for _ in range(8):
            with torch.autocast("cpu", dtype=torch.float16):
                logits = 14.0 * towers(image(), text())
                places = torch.arange(16)
                loss = weight * (functional.cross_entropy(logits, places) + functional.cross_entropy(logits.T, places))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return train


def test_samples_that_are_all_the_same_lose_nothing(guard: Guard) -> None:
    train = contrast(lambda: torch.ones(16, 12), lambda: torch.full((16,), 3), weight=0.5, dropout=0.0)
    assert guard(train).causes == []


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_samples_that_differ_do(guard: Guard, dropout: float) -> None:
    train = contrast(lambda: torch.randn(16, 12), lambda: torch.randint(0, 10, (16,)), weight=1e-7, dropout=dropout)
    run = guard(train)
    assert run.first.cause == "gradient-underflow"
    assert run.first.fixes[0].verified
