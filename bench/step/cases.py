"""What is stepped: parameters with gradients, and the two sequences that end an iteration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ampguard.engine.step import LossScale, apply_update, check_for_update

SCALE = 1024.0
MAX_NORM = 1.0
Make = Callable[[list[nn.Parameter], dict[str, Any]], torch.optim.Optimizer]


def transformer(total: int, width: int = 512) -> list[tuple[int, ...]]:
    """Shapes of transformer blocks, until they hold `total` parameters."""
    block = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,), (width,), (width,)]
    block += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    of_block = sum(torch.Size(shape).numel() for shape in block)
    return block * max(1, round(total / of_block))


MODELS: dict[str, list[tuple[int, ...]]] = {
    "tiny": [(16, 16)] * 120,
    "14M": transformer(14_000_000),
    "100M": transformer(100_000_000, width=1024),
}


@dataclass(frozen=True)
class Comparison:
    """PyTorch's sequence with one construction of an optimizer, beside ours with the plainest."""

    optimizer: type[torch.optim.Optimizer]
    theirs: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    clips: bool = True
    goal: float = 1.0

    def __str__(self) -> str:
        options = ", ".join(f"{key}={value}" for key, value in self.theirs.items())
        return f"{self.optimizer.__name__}({options})" + ("" if self.clips else ", no clipping")


MOMENTUM = {"momentum": 0.9}
COMPARISONS = [
    Comparison(torch.optim.AdamW, {"fused": True}, goal=1.3),
    Comparison(torch.optim.AdamW, goal=4.0),
    Comparison(torch.optim.AdamW, {"foreach": True}),
    Comparison(torch.optim.AdamW, {"fused": True}, clips=False),
    Comparison(torch.optim.AdamW, clips=False),
    Comparison(torch.optim.Adam, {"fused": True}),
    Comparison(torch.optim.Adam),
    Comparison(torch.optim.SGD, {"fused": True}),
    Comparison(torch.optim.SGD),
    Comparison(torch.optim.SGD, {"fused": True}, clips=False),
    Comparison(torch.optim.SGD, clips=False),
    Comparison(torch.optim.SGD, {**MOMENTUM, "fused": True}, MOMENTUM),
    Comparison(torch.optim.SGD, MOMENTUM, MOMENTUM),
    Comparison(torch.optim.Adagrad, {"fused": True}),
    Comparison(torch.optim.RMSprop),
    Comparison(torch.optim.RMSprop, clips=False),
    Comparison(torch.optim.NAdam),
    Comparison(torch.optim.NAdam, clips=False),
    Comparison(torch.optim.Adamax),
    Comparison(torch.optim.Adamax, clips=False),
]


class Iteration:
    """The end of an iteration, again and again on the same gradients: unscale, clip, step, update."""

    def __init__(self, shapes: list[tuple[int, ...]], comparison: Comparison, is_ours: bool, device: str) -> None:
        torch.manual_seed(0)
        self.parameters = [nn.Parameter(torch.randn(shape, device=device) * 0.02) for shape in shapes]
        for p in self.parameters:
            p.grad = torch.empty_like(p)
        options = comparison.ours if is_ours else comparison.theirs
        self.optimizer = comparison.optimizer(self.parameters, lr=1e-5, **options)
        self.max_norm = MAX_NORM if comparison.clips else None
        self.run = self.ours if is_ours else self.theirs
        self.scaler = torch.amp.GradScaler(device, init_scale=SCALE)
        self.scaler.scale(torch.ones((), device=device))
        self.loss_scale = LossScale(device, init_scale=SCALE)

    def theirs(self) -> None:
        if self.max_norm is not None:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.parameters, self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def ours(self) -> None:
        check = check_for_update([self.optimizer], self.parameters, self.loss_scale.value, self.max_norm)
        apply_update(self.optimizer, check, self.max_norm)
        self.loss_scale.update([check.found_inf])

    def backward(self, gradients: list[Tensor]) -> None:
        """Scaled gradients, as a backward pass leaves them."""
        for p, gradient in zip(self.parameters, gradients, strict=True):
            p.grad.copy_(gradient)  # type: ignore[union-attr]
