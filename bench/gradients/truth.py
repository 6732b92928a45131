"""The true gradients in float64, and how far the update that was made is from them."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from scenarios import LR, MAX_NORM, Scenario, bursts, loss_of

TOLERANCE = 0.01
"""Float16's own rounding stays well below this share of a gradient."""


def flat(part: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1).double() for p in part.parameters()])


@dataclass
class Judge:
    """Told of every micro-batch, clipping and step; compares what the weights did with what they should have done."""

    scenario: Scenario
    parts: list[nn.Module]
    ratios: list[float] = field(default_factory=list)
    """Length of each update over that of the true one."""
    errors: list[float] = field(default_factory=list)
    """Distance of each update from the true one, as a share of it."""
    touched: int = 0
    """Steps that overflowed, and changed weights all the same."""

    def __post_init__(self) -> None:
        self.sums: list[Tensor | None] = [None] * len(self.parts)
        self.is_bad = [False] * len(self.parts)

    def saw_batch(self, i: int, number: int) -> None:
        """A backward pass of the loss of part `i`."""
        exact = copy.deepcopy(self.parts[i]).double()
        share = self.scenario.window if self.scenario.order == "together" else 1
        (loss_of(self.scenario, i, exact, number) / share).backward()
        gradient = torch.cat([p.grad.reshape(-1) for p in exact.parameters() if p.grad is not None])
        self.sums[i] = gradient if self.sums[i] is None else self.sums[i] + gradient
        self.is_bad[i] |= bursts(self.scenario, i, number)

    def clipped(self, *chosen: int) -> None:
        """By the norm of these parts' gradients together."""
        held = [total for i in chosen if (total := self.sums[i]) is not None]
        factor = min(1.0, MAX_NORM / (float(torch.cat(held).norm()) + 1e-6))
        for i in chosen:
            total = self.sums[i]
            self.sums[i] = None if total is None else total * factor

    def stepped(self, i: int, before: Tensor) -> None:
        """The weights were `before`, and are what the step has made of them."""
        made, true = (before - flat(self.parts[i])) / LR, self.sums[i]
        is_bad, self.sums[i], self.is_bad[i] = self.is_bad[i], None, False
        if is_bad:
            self.touched += bool(made.count_nonzero())
            return
        assert true is not None
        self.ratios.append(float(made.norm() / true.norm()))
        self.errors.append(float((made - true).norm() / true.norm()))

    @property
    def is_right(self) -> bool:
        return bool(self.errors) and max(self.errors) < TOLERANCE and not self.touched

    def verdict(self) -> str:
        """`right`, or the update that was furthest off."""
        if self.touched:
            return "**an overflow reached the weights**"
        if not self.errors:
            return "nothing was updated"
        if self.is_right:
            return "right"
        worst = max(self.ratios, key=lambda r: abs(math.log(r)) if r > 0 and math.isfinite(r) else math.inf)
        return f"**{worst:.3g} times**"
