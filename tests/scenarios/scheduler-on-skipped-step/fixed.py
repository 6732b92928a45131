"""The scheduler waits for a step."""

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
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=40)
for step in range(32):
    optimizer.zero_grad()
    scaler.scale(loss_of(model)).backward()
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= scale:
        schedule.step()
