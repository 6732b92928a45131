"""Runs that stay within float16, some of them close to its end: a forecast for any of them is a false alarm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from growing import descend
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

STEPS = 2000


def classifier(width: int = 64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 16)
    return x, x[:, :4].argmax(1)


def train(
    model: nn.Module,
    lr: Callable[[int], float],
    gain: Callable[[int], float] = lambda step: 1.0,
    optimizer: type[torch.optim.Optimizer] = torch.optim.Adam,
    dtype: torch.dtype = torch.float16,
    **options: float,
) -> Iterator[float]:
    """Train a classifier of noise; `gain` multiplies its input."""
    chosen = optimizer(model.parameters(), lr=lr(0), **options)  # type: ignore[call-arg]
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=dtype == torch.float16)
    for step in range(STEPS):
        chosen.param_groups[0]["lr"] = lr(step)
        x, y = batch()
        with torch.autocast("cpu", dtype=dtype):
            loss = F.cross_entropy(model(x * gain(step)).float(), y)
        yield descend(loss, chosen, scaler)


class Scaled(nn.Module):
    """A classifier with a stage inside that multiplies by a constant and normalises afterwards."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.body, self.head, self.factor = nn.Linear(16, 32), nn.Linear(32, 4), factor

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x)) * self.factor
        return self.head(F.layer_norm(h.float(), (32,)))


class Levelling(nn.Module):
    """A gate that opens during training and is then fully open: growth that levels off at `top`."""

    def __init__(self, top: float) -> None:
        super().__init__()
        self.register_buffer("gate", torch.full((32,), -6.0))
        self.body, self.head, self.top = nn.Linear(16, 32), nn.Linear(32, 4), top

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.gate += 0.02 * torch.sigmoid(-self.gate)
        h = self.top * torch.sigmoid(self.gate).half() * torch.tanh(self.body(x))
        return self.head(F.layer_norm(h.float(), (32,)))


def plain() -> Iterator[float]:
    """A classifier: activations grow a little and level off."""
    return train(classifier(), lambda step: 3e-3)


def overfitted() -> Iterator[float]:
    """A classifier far beyond convergence: logits grow like log t."""
    return train(classifier(128), lambda step: 1e-2)


def large_and_stable() -> Iterator[float]:
    """Activations of 30,000 from the first step on."""
    return train(Scaled(30_000.0), lambda step: 1e-3)


def levels_off_at_20000() -> Iterator[float]:
    return train(Levelling(20_000.0), lambda step: 2e-2)


def levels_off_at_50000() -> Iterator[float]:
    return train(Levelling(50_000.0), lambda step: 2e-2)


def spikes() -> Iterator[float]:
    """Single batches 200 times as large as the others."""
    return train(classifier(), lambda step: 1e-4, lambda step: 4000.0 if step % 97 == 96 else 20.0)


def more_and_more_noise() -> Iterator[float]:
    """Heavy-tailed input around a high level."""
    noise = torch.Generator().manual_seed(1)
    return train(
        classifier(), lambda step: 1e-4, lambda step: 3000 * math.exp(0.4 * float(torch.randn((), generator=noise)))
    )


def warm_up() -> Iterator[float]:
    """The learning rate rises for 600 steps, and activations with it."""
    return train(Scaled(8_000.0), lambda step: 3e-3 * min(1.0, (step + 1) / 600))


def loud_warm_up() -> Iterator[float]:
    """The input's gain is warmed up with the learning rate, to activations of about 25,000."""
    return train(
        classifier(), lambda step: 1e-4 * min(1.0, (step + 1) / 800), lambda step: 8_000.0 * min(1.0, (step + 1) / 800)
    )


def cyclic() -> Iterator[float]:
    """A learning rate that goes up and down."""
    return train(classifier(), lambda step: 5e-3 * (1 + math.sin(step / 60)), optimizer=torch.optim.SGD, momentum=0.9)


def decayed() -> Iterator[float]:
    """Adam with weight decay: weights grow to the balance."""
    return train(classifier(), lambda step: 1e-2, lambda step: 500.0, optimizer=torch.optim.AdamW, weight_decay=1.0)


def in_bfloat16() -> Iterator[float]:
    """Values beyond 65,504 in a type that has room for them."""
    return train(classifier(), lambda step: 1e-2, lambda step: 1000.0 + 100 * step, dtype=torch.bfloat16)


def batch_norm() -> Iterator[float]:
    """Scale-invariant weights that grow under a norm."""
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    return train(model, lambda step: 2e-2)


HEALTHY = {
    f.__name__: f
    for f in (
        plain,
        overfitted,
        large_and_stable,
        levels_off_at_20000,
        levels_off_at_50000,
        spikes,
        more_and_more_noise,
        warm_up,
        loud_warm_up,
        cyclic,
        decayed,
        in_bfloat16,
        batch_norm,
    )
}
