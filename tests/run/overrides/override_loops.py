"""Small training loops as people write them, with and without AMP."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    make = lambda: (torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator))  # noqa: E731
    return [make() for _ in range(count)]


def weights(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def train_with_amp(precision: str, steps: int = 5, region: Callable[..., Any] = torch.autocast) -> nn.Module:
    """The textbook loop: autocast around model and loss, and a scaler for float16."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    for x, y in batches(steps):
        optimizer.zero_grad()
        with region("cpu", dtype=DTYPES[precision]) if precision != "fp32" else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return net


def spoil(gradient: Tensor) -> Tensor:
    return torch.full_like(gradient, float("inf"))


def train_plain(steps: int = 6, every: int = 1, spoilt: int | None = None) -> nn.Module:
    """A float32 loop that knows nothing of AMP: accumulation, clipping, two optimizers; one gradient may be infinite."""
    net = model()
    optimizers = [torch.optim.SGD(net[0].parameters(), 0.1, momentum=0.9), torch.optim.AdamW(net[3].parameters(), 1e-2)]
    for step, (x, y) in enumerate(batches(steps * every)):
        if step % every == 0:
            for optimizer in optimizers:
                optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y) / every
        hook = net[0].weight.register_hook(spoil) if step == spoilt else None
        loss.backward()
        if hook is not None:
            hook.remove()
        if step % every == every - 1:
            nn.utils.clip_grad_value_(net.parameters(), 0.5)
            for optimizer in optimizers:
                optimizer.step()
    return net


def train_by_hand(steps: int = 6, every: int = 1, spoilt: int | None = None) -> nn.Module:
    """What `train_plain` is to be in float16, written out with PyTorch's own autocast and scaler."""
    net = model()
    optimizers = [torch.optim.SGD(net[0].parameters(), 0.1, momentum=0.9), torch.optim.AdamW(net[3].parameters(), 1e-2)]
    scaler = torch.amp.GradScaler("cpu")
    for step, (x, y) in enumerate(batches(steps * every)):
        if step % every == 0:
            for optimizer in optimizers:
                optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            output = net(x)
        loss = nn.functional.cross_entropy(output.float(), y) / every
        hook = net[0].weight.register_hook(spoil) if step == spoilt else None
        scaler.scale(loss).backward()
        if hook is not None:
            hook.remove()
        if step % every == every - 1:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            for p in net[0].parameters():
                if p.grad is not None:
                    p.grad.clamp_(-0.5, 0.5) if torch.isfinite(p.grad).all() else None
            nn.utils.clip_grad_value_([*net[1].parameters(), *net[3].parameters()], 0.5)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    return net


class Asserting(nn.Module):
    """Written for float32, and sees to it. (Here, as pytest gives every `assert` of a test file words.)"""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        assert hidden.dtype == torch.float32
        return self.second(hidden)
