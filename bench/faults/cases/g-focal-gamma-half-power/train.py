"""Pixel-wise defects with a focal loss; gamma was picked by a sweep over {0.5, 1, 2}."""

import argparse

import torch
from torch import nn


def binary_focal_loss_with_logits(logits, target, alpha=0.25, gamma=2.0, eps=1e-8):
    probs = torch.sigmoid(logits)
    pos = -alpha * torch.pow(1.0 - probs, gamma) * target * torch.log(probs + eps)
    neg = -(1 - alpha) * torch.pow(probs, gamma) * (1.0 - target) * torch.log(1.0 - probs + eps)
    return (pos + neg).mean()


class DefectNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(1 if i == 0 else width, width, 3, padding=1) for i in range(3)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(width) for _ in range(3)])
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        for conv, norm in zip(self.layers, self.norms):
            x = torch.relu(norm(conv(x)))
        return self.out(x)


def plates(steps, size=24):
    g = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = 0.1 * torch.randn(4, 1, size, size, generator=g)
        y = torch.zeros_like(x)
        for b in range(4):
            r, c = torch.randint(0, size - 6, (2,), generator=g).tolist()
            y[b, 0, r : r + 6, c : c + 6] = 1
        contrast = torch.empty(4, 1, 1, 1).log_normal_(0.9, 0.35, generator=g)  # lamps differ between lines
        yield x + contrast * y, y


parser = argparse.ArgumentParser()
parser.add_argument("--gamma", type=float, default=0.5)
parser.add_argument("--steps", type=int, default=80)
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(6)
net = DefectNet()
optim = torch.optim.Adam(net.parameters(), lr=args.lr)
for it, (x, y) in enumerate(plates(args.steps)):
    loss = binary_focal_loss_with_logits(net(x), y, gamma=args.gamma)
    optim.zero_grad()
    loss.backward()
    optim.step()
    if it % 8 == 0:
        print(f"it {it:3d} focal {loss.item():.6f}")
