"""An ordinary loop: the model of `tiny` in float32 without a scaler, clipped, with the loss and the hits read in each step.

Run `python loop.py STEPS`; prints the CPU time of every block of steps.
"""

from __future__ import annotations

from collections.abc import Callable

import tiny
import torch
from torch import Tensor, nn
from torch.nn import functional


def make(device: str = "cpu") -> tuple[nn.Module, Callable[[], Tensor]]:
    """The model, and a function that trains it by one step and returns the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(*(tiny.Residual(16) for _ in range(40)), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(8, 16, device=device)
    y = torch.randint(4, (8,), device=device)
    read: dict[str, object] = {}

    def step() -> Tensor:
        logits = model(x)
        loss = functional.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        read.update(loss=loss.item(), hits=(logits.argmax(1) == y).float().mean().item(), logits=logits)
        return loss.detach()

    return model, step


if __name__ == "__main__":
    tiny.main(make)
