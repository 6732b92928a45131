"""Dense rays and depth from an image. Mixed precision because the memory was short."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import autocast


class ConvBlock(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, padding=1)
        self.norm = nn.GroupNorm(4, cout)

    def forward(self, x):
        return F.silu(self.norm(self.conv(x)))


class RayNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.encoder = nn.Sequential(ConvBlock(3, width), ConvBlock(width, width))
        self.depth_head = nn.Conv2d(width, 1, 1)
        self.ray_head = nn.Conv2d(width, 3, 1)

    def forward(self, images):
        h = self.encoder(images)
        return {"depth": self.depth_head(h), "rays": self.ray_head(h)}


class MultiTaskLoss(nn.Module):
    def __init__(self, w_depth=1e-3, w_rays=1e-3):
        super().__init__()
        self.w_depth, self.w_rays = w_depth, w_rays

    def forward(self, out, target):
        depth = F.mse_loss(out["depth"], target["depth"])
        rays = F.mse_loss(out["rays"], target["rays"])
        return self.w_depth * depth + self.w_rays * rays


def make_batch(g, size=96, batch=4):
    images = torch.rand(batch, 3, size, size, generator=g)
    depth = F.avg_pool2d(images.mean(1, keepdim=True), 3, 1, 1)
    return images, {"depth": depth, "rays": 0.5 - images}


def train(steps=12):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model, criterion = RayNet(), MultiTaskLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        images, target = make_batch(g)
        optimizer.zero_grad(set_to_none=True)
        with autocast("cpu", dtype=torch.float16):
            loss = criterion(model(images), target)
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            print(f"step {step:03d} loss {1e3 * loss.item():.4f}e-3")


if __name__ == "__main__":
    train()
