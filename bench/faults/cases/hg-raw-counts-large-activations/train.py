"""Gene counts go into the network as they are; the hidden activations stay near half of float16's range."""

import argparse

import torch
from torch import nn


class CountEncoder(nn.Module):
    def __init__(self, genes=128, hidden=64, kinds=5):
        super().__init__()
        self.total = nn.Linear(genes, hidden, bias=False)
        nn.init.uniform_(self.total.weight, 0.0, 1.0)
        self.norm = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, kinds))
        self.peak = 0.0

    def forward(self, counts):
        h = self.total(counts)
        self.peak = max(self.peak, h.detach().abs().max().item())
        return self.mlp(self.norm(h.float()))


def cells(n, g):
    kind = torch.randint(0, 5, (n,), generator=g)
    profile = torch.rand(5, 128, generator=torch.Generator().manual_seed(0))
    rate = (0.3 + profile[kind]) * 560
    return torch.poisson(rate, generator=g), kind


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    g = torch.Generator().manual_seed(5)
    model = CountEncoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    for step in range(args.steps):
        counts, kind = cells(32, g)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(counts), kind)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f} largest activation {model.peak:.0f}")
    print(f"final loss {loss.item():.4f}, largest activation {model.peak:.0f}")


if __name__ == "__main__":
    main()
