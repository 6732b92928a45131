"""Launch-bound: 40 residual layers of width 16, some 2,200 ATen operators in a few milliseconds a step.

Run `python tiny.py STEPS`; prints the CPU time of every block of steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.fc(self.norm(x)))


def make(device: str = "cpu") -> tuple[nn.Module, Callable[[], Tensor]]:
    """The model, and a function that trains it by one step and returns the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual(16) for _ in range(40)), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    x = torch.randn(8, 16, device=device)
    y = torch.randint(4, (8,), device=device)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return model, step


def main(make: Callable[[str], tuple[nn.Module, Callable[[], Tensor]]] = make) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--block", type=int, default=40, help="steps in a block")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    _, step = make(args.device)
    for first in range(0, args.steps, args.block):
        start = time.process_time()
        for _ in range(min(args.block, args.steps - first)):
            loss = step()
        seconds = time.process_time() - start
        print(f"steps {first}..{first + args.block - 1}  loss {loss.item():.4f}  cpu {seconds:.6f} s", flush=True)


if __name__ == "__main__":
    main()
