import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Lesions(Dataset):
    """Bright discs on noise. Training uses random crops, validation the whole slide."""

    def __init__(self, n, size, crop=None, seed=0):
        self.n, self.size, self.crop, self.seed = n, size, crop, seed

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 1000 + i)
        yy, xx = torch.meshgrid(torch.arange(self.size), torch.arange(self.size), indexing="ij")
        cy, cx = (torch.rand(2, generator=g) * 0.4 + 0.3) * self.size
        r = (0.25 + 0.2 * torch.rand(1, generator=g)) * self.size
        mask = (((yy - cy) ** 2 + (xx - cx) ** 2) < r * r).float()[None]
        img = mask * 1.5 + 0.5 * torch.randn(1, self.size, self.size, generator=g)
        if self.crop:
            y, x = torch.randint(0, self.size - self.crop, (2,), generator=g).tolist()
            img, mask = img[:, y : y + self.crop, x : x + self.crop], mask[:, y : y + self.crop, x : x + self.crop]
        return img, mask


class DiceLoss(nn.Module):
    def __init__(self, smooth=1.0):
        super().__init__()
        self.smooth = smooth

    def forward(self, y_pred, y_true):
        y_pred = y_pred.sigmoid().flatten()
        y_true = y_true.to(y_pred.dtype).flatten()
        intersection = torch.sum(y_pred * y_true)
        cardinality = torch.sum(y_pred + y_true)
        return 1.0 - (2.0 * intersection + self.smooth) / (cardinality + self.smooth)


def run_epoch(loader, net, criterion, optimizer=None, scaler=None):
    net.train(optimizer is not None)
    losses = []
    for image, mask in loader:
        with torch.set_grad_enabled(optimizer is not None), torch.autocast("cpu", dtype=torch.float16):
            loss = criterion(net(image), mask)
        if optimizer is not None:
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())
    return sum(losses) / len(losses)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1))
    criterion = DiceLoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    train = DataLoader(Lesions(24, 160, crop=64), batch_size=4, num_workers=1)
    valid = DataLoader(Lesions(2, 640, seed=1), batch_size=1)
    for epoch in range(args.epochs):
        t = run_epoch(train, net, criterion, optimizer, scaler)
        v = run_epoch(valid, net, criterion)
        print(f"epoch {epoch}  train dice loss {t:.4f}  valid dice loss {v:.4f}")
