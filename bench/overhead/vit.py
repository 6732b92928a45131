"""Compute-bound: a ViT of 6 M parameters on two images of 24 x 24, about 0.3 s a step on one CPU core.

Run `python vit.py STEPS`; prints the CPU time of every block of steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        attn = (q * (dim // self.heads) ** -0.5) @ k.transpose(-2, -1)
        x = attn.softmax(dim=-1) @ v
        return self.proj(x.transpose(1, 2).reshape(batch, tokens, dim))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, dim: int = 256, depth: int = 8, heads: int = 4, patch: int = 8, size: int = 24) -> None:
        super().__init__()
        self.patch = patch
        tokens = (size // patch) ** 2
        self.embed = nn.Linear(3 * patch * patch, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, tokens + 1, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = functional.unfold(images, self.patch, stride=self.patch).transpose(1, 2)
        x = self.embed(x)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def make(device: str = "cpu") -> tuple[nn.Module, Callable[[], Tensor]]:
    """The model, and a function that trains it by one step and returns the loss."""
    torch.manual_seed(0)
    model = ViT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    images = torch.randn(2, 3, 24, 24, device=device)
    labels = torch.randint(10, (2,), device=device)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            loss = functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return model, step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--block", type=int, default=3, help="steps in a block")
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
