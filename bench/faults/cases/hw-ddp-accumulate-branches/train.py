"""Two tasks with DistributedDataParallel: each rank may draw another task in a step; accumulation; -Inf in a mask.

torchrun --nproc-per-node 2 train.py
"""

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class TwoTasks(nn.Module):
    def __init__(self, width=12, words=8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.LayerNorm(32))
        self.tag = nn.Linear(32, words)
        self.score = nn.Linear(32, 1)

    def forward(self, x, task, allowed):
        h = self.encoder(x)
        if task == "score":
            return self.score(h).squeeze(1)
        return self.tag(h).masked_fill(~allowed, float("-inf"))


def draws(rank, count):
    g = torch.Generator().manual_seed(7 + rank)
    for _ in range(count):
        x = torch.randn(8, 12, generator=g)
        allowed = torch.rand(8, 8, generator=g) < 0.7
        label = torch.randint(0, 8, (8,), generator=g)
        allowed[torch.arange(8), label] = True
        yield x, ("tag", "score")[int(torch.rand(1, generator=g) < 0.5)], allowed, label


def main(window=2):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DistributedDataParallel(TwoTasks(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=15)
    for i, (x, task, allowed, label) in enumerate(draws(rank, 80)):
        last = (i + 1) % window == 0
        with contextlib.nullcontext() if last else model.no_sync():
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(x, task, allowed)
            if task == "tag":
                loss = nn.functional.cross_entropy(out.float(), label)
            else:
                loss = nn.functional.mse_loss(out.float(), x.mean(1))
            scaler.scale(loss / window).backward()
        if last:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if i % 20 == 0 and rank == 0:
            print(f"batch {i} {task} loss {loss.item():.4f} scale {scaler.get_scale():.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
