"""Regress raw prices with DistributedDataParallel, gradients sent in half precision to save bandwidth.

torchrun --nproc-per-node 2 train.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel


class Regressor(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.price = nn.Linear(64, 1)

    def forward(self, x):
        return self.price(self.body(x)).squeeze(1)


def houses(rank, count, batch):
    """Prices in thousands; in the second region there is a palace or two."""
    g = torch.Generator().manual_seed(50 + rank)
    value = torch.rand(16, generator=torch.Generator().manual_seed(1))
    for i in range(count):
        x = torch.rand(batch, 16, generator=g)
        y = 20 * (x @ value)
        if rank == 1 and i == 22:
            y[3] = 9.0e6
        yield x, y


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DistributedDataParallel(Regressor())
    model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    for step, (x, y) in enumerate(houses(rank, 40, 16)):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        if step % 5 == 0 and rank == 0:
            print(f"step {step} loss {loss.item():.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
