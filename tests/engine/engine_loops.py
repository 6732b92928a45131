"""Small real training loops that the engine's tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import ampguard

MODES = ("fp32", "fp16", "O2", "O3", "bf16", "bf16-true", "tf32")


class Net(nn.Module):
    """A regression with everything that a mode treats apart: a norm with statistics, one without, dropout, a mask."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 32)
        self.norm = nn.LayerNorm(32)
        self.statistics = nn.BatchNorm1d(32)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(32, 1)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.inner(x)))
        return self.head(self.dropout(self.statistics(hidden)))


def batch(number: int, size: int = 32) -> tuple[Tensor, Tensor]:
    """The same numbers for the same `number`, whatever the state of the global generator."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(size, 8, generator=generator)
    return x, 2 * x[:, :1] - x[:, 1:2]


def made(precision: str = "fp16", *, seed: int = 0, lr: float = 1e-2, **options: Any) -> ampguard.Amp:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    options.setdefault("init_scale", 1024.0)
    return ampguard.Amp(model, optimizer, precision, **options)


def model_of(amp: ampguard.Amp) -> nn.Module:
    return next(iter(amp.models.values()))


def loss_of(amp: ampguard.Amp, number: int, spoil: float | None = None) -> Tensor:
    x, y = batch(number)
    if spoil is not None:
        x[3, 2] = spoil
    with amp.autocast():
        return nn.functional.mse_loss(model_of(amp)(x), y)


def train(amp: ampguard.Amp, steps: range, spoil: dict[int, float] | None = None) -> list[float]:
    losses = []
    for number in steps:
        loss = loss_of(amp, number, (spoil or {}).get(number))
        amp.backward(loss)
        amp.step()
        losses.append(loss.item())
    return losses


def weights(amp: ampguard.Amp) -> list[Tensor]:
    """Copies of everything that a run leaves behind in the models."""
    return [value.clone() for model in amp.models.values() for value in model.state_dict().values()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
