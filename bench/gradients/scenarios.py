"""What a training does in an iteration: how many optimizers, which windows, what is clipped, what overflows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

LR, MAX_NORM, BATCHES, BURST = 0.1, 0.05, 8, 1e36
DIGITS = load_digits()
IMAGES = torch.tensor(DIGITS.data, dtype=torch.float32) / 16
LABELS = torch.tensor(DIGITS.target)


@dataclass(frozen=True)
class Scenario:
    """One row of the table."""

    title: str
    count: int = 1
    """Optimizers, each with a linear classifier and a loss of its own."""
    window: int = 1
    """Micro-batches of a step."""
    clip: str = ""
    """`end`: each optimizer's gradients, to MAX_NORM, before its step. `joint`: all by one norm.
    `every`: after every micro-batch."""
    order: str = "together"
    """`together`: one backward pass of all losses. `in turn`: a backward pass and a step for each. `waiting`: together,
    and all but the first step after every second batch only."""
    burst: int | None = None
    """The optimizer whose gradients overflow in batch 2 (every sixth)."""
    fused: bool = False

    @property
    def is_automatic(self) -> bool:
        """What Lightning does by itself, and so would not be written by hand there."""
        return self.count == 1 and self.clip != "every"


SCENARIOS = (
    Scenario("one optimizer"),
    Scenario("one optimizer, it overflows", burst=0),
    Scenario("one optimizer, clipped", clip="end"),
    Scenario("one optimizer, clipped, fused", clip="end", fused=True),
    Scenario("windows of 4", window=4),
    Scenario("windows of 4, clipped at the end", window=4, clip="end"),
    Scenario("windows of 4, clipped after every micro-batch", window=4, clip="every"),
    Scenario("three optimizers", count=3),
    Scenario("three optimizers, the first overflows", count=3, burst=0),
    Scenario("three optimizers, the last overflows", count=3, burst=2),
    Scenario("three optimizers, clipped together", count=3, clip="joint"),
    Scenario("three optimizers, each clipped", count=3, clip="end"),
    Scenario("three optimizers, each clipped, the first overflows", count=3, clip="end", burst=0),
    Scenario("two optimizers in turn, the first overflows", count=2, order="in turn", burst=0),
    Scenario("two optimizers in turn, each clipped", count=2, order="in turn", clip="end"),
    Scenario("two optimizers, one waits while the other overflows", count=2, order="waiting", burst=0),
)


def parts_of(scenario: Scenario) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(64, 10) for _ in range(scenario.count)]


def optimizer_of(scenario: Scenario, part: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(part.parameters(), LR, fused=scenario.fused or None)


def batch(number: int) -> tuple[Tensor, Tensor]:
    rows = slice(32 * number, 32 * number + 32)
    return IMAGES[rows], LABELS[rows]


def bursts(scenario: Scenario, part: int, number: int) -> bool:
    return scenario.burst == part and number % 6 == 2


def loss_of(scenario: Scenario, i: int, part: nn.Module, number: int) -> Tensor:
    """The loss of one part on one batch; to be called in autocast, or with a part in float64."""
    x, y = batch(number)
    scores = part(x.to(next(part.parameters()).dtype))
    loss = nn.functional.cross_entropy(scores if scores.dtype == torch.float64 else scores.float(), y)
    return loss * BURST if bursts(scenario, i, number) and loss.dtype != torch.float64 else loss
