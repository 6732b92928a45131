"""Find defects in products with DistributedDataParallel: reconstruct what is normal, keep away from what is not.

torchrun --nproc-per-node 2 train.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Products(Dataset):
    def __init__(self, n=480):
        g = torch.Generator().manual_seed(12)
        self.x = torch.tanh(torch.randn(n, 5, generator=g) @ torch.randn(5, 40, generator=g))
        self.defect = torch.rand(n, generator=g) < 0.45
        self.x[self.defect] += 0.8 * torch.randn(int(self.defect.sum()), 40, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.defect[i]


class Reconstruction(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, 6))
        self.decoder = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, width))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def anomaly_loss(error, defect, margin=1.0):
    normal = error[~defect].mean()
    abnormal = torch.relu(margin - error[defect]).sum() / len(error)
    return normal + abnormal


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DistributedDataParallel(Reconstruction())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data = Products()
    sampler = DistributedSampler(data, shuffle=True, seed=4)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    step = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, defect in loader:
            error = (model(x) - x).pow(2).mean(1)
            loss = anomaly_loss(error, defect)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 15 == 0 and rank == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
            step += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
