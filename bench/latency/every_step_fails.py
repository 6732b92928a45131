"""A training that is damaged in every step; the scaler skips them all.

Run `python every_step_fails.py TIMES.json KIND`: `same` fails in one layer each time, `moving` in all in turn.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x: Tensor, gain: float) -> Tensor:
        return x + torch.tanh(self.fc(x) * gain / gain)


class Net(nn.Module):
    def __init__(self, width: int = 64, depth: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor, broken_layer: int) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x, 0.0 if index == broken_layer else 1.0)
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("times", type=Path)
    parser.add_argument("kind", choices=["same", "moving"])
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu")
    times = []
    for step in range(args.steps):
        began = time.process_time()
        broken_layer = step % 12 if args.kind == "moving" else 5
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(torch.randn(8, 64), broken_layer), torch.randint(4, (8,)))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        times.append(time.process_time() - began)
    args.times.write_text(json.dumps(times))


if __name__ == "__main__":
    sys.exit(main())
