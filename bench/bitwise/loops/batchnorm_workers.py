"""BatchNorm, dropout and a DataLoader with two workers that augment; two samples of the data set are damaged."""

from __future__ import annotations

import random

import numpy as np
import torch
from state import arguments, save_digests, seed_all
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = index % 4
        image = torch.full((3, 8, 8), float(label)) + torch.randn(3, 8, 8) * random.uniform(0.5, 1.0)
        image += float(np.random.rand())
        if index in (77, 250):
            image[1, 2, 3] = float("inf")
        return image, label


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.dropout = nn.Dropout(0.25)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.stem(x).mean(dim=(2, 3))))


def main() -> None:
    args = arguments()
    seed_all(6)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    loader = DataLoader(Noisy(8 * args.steps), batch_size=8, shuffle=True, num_workers=2)
    losses = []

    model.train()
    for images, labels in loader:
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())

    # The damaged samples have poisoned the running statistics by now, so these outputs are NaN.
    model.eval()
    with torch.no_grad():
        losses.append(model(torch.randn(8, 3, 8, 8)).sum().item())

    save_digests(args.digests, losses, [model], [optimizer], scaler)


if __name__ == "__main__":
    main()
