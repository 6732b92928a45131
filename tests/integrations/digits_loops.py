"""A small network on scikit-learn's digits, trained as the frameworks' loops do, for the drop-ins' tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

DIGITS = load_digits()
IMAGES = torch.tensor(DIGITS.images, dtype=torch.float32).unsqueeze(1) / 16
LABELS = torch.tensor(DIGITS.target)
Batch = tuple[Tensor, Tensor]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def batches(count: int, bad: tuple[int, ...] = (), seed: int = 1) -> Iterator[Batch]:
    """The same images for the same seed; those in `bad` are too bright for float16."""
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        rows = torch.randint(0, 1400, (32,), generator=generator)
        yield IMAGES[rows] * (1e6 if number in bad else 1), LABELS[rows]


def loss_of(model: nn.Module, batch: Batch, dtype: torch.dtype = torch.float16) -> Tensor:
    x, y = batch
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        return nn.functional.cross_entropy(model(x), y)


def train(
    scaler: Callable[..., Tensor | None],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    count: int = 16,
    *,
    window: int = 1,
    bad: tuple[int, ...] = (),
    word: str = "update_grad",
    dtype: torch.dtype = torch.float16,
    **words: Any,
) -> list[float | None]:
    """The loop of Swin and MAE, with what the scaler returns after each micro-batch."""
    norms: list[float | None] = []
    for number, batch in enumerate(batches(count * window, bad)):
        ends = (number + 1) % window == 0
        norm = scaler(
            loss_of(model, batch, dtype) / window, optimizer, parameters=model.parameters(), **words, **{word: ends}
        )
        if ends:
            optimizer.zero_grad()
        norms.append(None if norm is None else float(norm))
    return norms


class TorchScaler:
    """PyTorch's own calls in the order of its documentation: scale, backward, unscale_, clip, step, update."""

    def __init__(self, clip: Callable[[list[Tensor], float], Any] | None = None) -> None:
        self.scaler = torch.amp.GradScaler("cpu")
        self.clip = clip or (lambda parameters, limit: torch.nn.utils.clip_grad_norm_(parameters, limit))

    def __call__(
        self,
        loss: Tensor,
        optimizer: torch.optim.Optimizer,
        clip_grad: float | None = None,
        parameters: Any = None,
        update_grad: bool = True,
        **_: Any,
    ) -> Tensor | None:
        self.scaler.scale(loss).backward()
        if not update_grad:
            return None
        self.scaler.unscale_(optimizer)
        held = [p for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in held])
        if clip_grad is not None:
            self.clip(held, clip_grad)
        self.scaler.step(optimizer)
        self.scaler.update()
        return norm


def accuracy(model: nn.Module) -> float:
    with torch.no_grad():
        return float((model(IMAGES[1400:]).argmax(1) == LABELS[1400:]).float().mean())


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def furthest(left: nn.Module, right: nn.Module) -> float:
    """The largest difference between two models' weights."""
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)
