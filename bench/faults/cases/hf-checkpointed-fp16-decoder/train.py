"""A causal decoder under activation checkpointing (with dropout) and float16 autocast; the criterion sits outside autocast."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential


class CausalBlock(nn.Module):
    def __init__(self, dim, heads, window):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("mask", torch.full((window, window), float("-inf")).triu(1), persistent=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.norm(x)).chunk(3, -1))
        scores = (q / math.sqrt(d // self.heads)) @ k.transpose(-2, -1) + self.mask[:t, :t]
        mixed = (F.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(b, t, d)
        return x + self.drop(self.proj(mixed))


class Decoder(nn.Module):
    def __init__(self, vocab=40, dim=32, depth=4, window=24):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.position = nn.Parameter(torch.randn(window, dim) * 0.02)
        self.blocks = nn.Sequential(*[CausalBlock(dim, 4, window) for _ in range(depth)])
        self.out = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids) + self.position[: ids.shape[1]]
        if self.training:
            x = checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)
        else:
            x = self.blocks(x)
        return self.out(x)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    criterion = nn.CrossEntropyLoss()
    scaler = torch.amp.GradScaler("cpu")
    g = torch.Generator().manual_seed(2)
    for step in range(40):
        ids = (torch.randint(0, 40, (8, 1), generator=g) + torch.arange(21)) % 40
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(ids[:, :-1])
        loss = criterion(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 8 == 0:
            print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():.0f}")
    model.eval()
    with torch.no_grad():
        print("eval", criterion(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).item())


if __name__ == "__main__":
    main()
