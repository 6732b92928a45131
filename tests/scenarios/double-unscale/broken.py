"""Unscaled once for the norm to log and once more for clipping."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


def batch():
    return torch.randn(8, 6), torch.randint(0, 3, (8,))


def loss_of(model):
    x, y = batch()
    with torch.autocast("cpu", dtype=torch.float16):
        return F.cross_entropy(model(x), y)


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(6):
    optimizer.zero_grad()
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(optimizer)
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    scaler.unscale_(optimizer)  # <- here
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
