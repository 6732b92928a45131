import math
import sys

import torch
import torch.nn as nn

from losses import depth_loss
from misc import NativeScaler


class UNetish(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(3, c, 3, 2, 1), nn.ReLU())
        self.down2 = nn.Sequential(nn.Conv2d(c, 2 * c, 3, 2, 1), nn.ReLU())
        self.up1 = nn.ConvTranspose2d(2 * c, c, 4, 2, 1)
        self.up2 = nn.ConvTranspose2d(2 * c, 1, 4, 2, 1)

    def forward(self, rgb):
        a = self.down1(rgb)
        b = torch.relu(self.up1(self.down2(a)))
        return self.up2(torch.cat([a, b], 1))


def scenes(n, crop=24, batch=4):
    g = torch.Generator().manual_seed(21)
    for i in range(n):
        depth = 1.0 + 4.0 * torch.rand(batch, 1, crop, crop, generator=g)
        depth = nn.functional.avg_pool2d(depth, 5, 1, 2)
        rgb = torch.cat([1 / depth, depth / 5, torch.rand(batch, 1, crop, crop, generator=g)], 1)
        # lidar: the upper part of a crop has no returns; a crop of sky has none at all
        horizon = torch.randint(0, crop - 4, (batch,), generator=g)
        if i == 13:
            horizon[2] = crop
        rows = torch.arange(crop)[None, None, :, None]
        yield rgb, depth * (rows >= horizon[:, None, None, None])


def train_one_epoch(model, loader, optimizer, loss_scaler):
    model.train()
    for it, (rgb, depth) in enumerate(loader):
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(rgb)
        loss = depth_loss(out, depth)
        loss_value = loss.item()
        if not math.isfinite(loss_value):
            print("Loss is {}, stopping training".format(loss_value))
            sys.exit(1)
        optimizer.zero_grad()
        norm = loss_scaler(loss, optimizer, clip_grad=5.0, parameters=model.parameters())
        print(f"[{it:3d}] loss {loss_value:.4f} grad_norm {norm.item():.3f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = UNetish()
    train_one_epoch(net, scenes(20), torch.optim.Adam(net.parameters(), lr=2e-3), NativeScaler())
