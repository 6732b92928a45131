"""A training whose attention logits overflow float16 in one step: a batch with pixels that were never normalised.

Run `python one_failure.py TIMES.json [--dim D]`; writes when each step began and when its loss was known.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

FAILING_STEP = 8


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        attn = (q @ k.transpose(-2, -1)) * x.shape[-1] ** -0.5
        return x + self.proj(attn.softmax(dim=-1) @ v)


class Encoder(nn.Module):
    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(48, dim)
        self.blocks = nn.ModuleList(
            nn.Sequential(Attention(dim), nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU()) for _ in range(depth)
        )
        self.head = nn.Linear(dim, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("times", type=Path)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--depth", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Encoder(args.dim, args.depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    times = []
    for step in range(FAILING_STEP + 4):
        images, labels = torch.rand(4, 16, 48), torch.randint(10, (4,))
        if step == FAILING_STEP:
            images *= 2000
        began = time.monotonic()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(images), labels)
        times.append({"began": began, "loss_known": time.monotonic(), "finite": math.isfinite(loss.detach())})
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        times[-1]["ended"] = time.monotonic()
    args.times.write_text(json.dumps(times))


if __name__ == "__main__":
    sys.exit(main())
