"""Normalising by hand in float16: small values square to 0, and the epsilon of 1e-8 is 0 as well."""

import torch
from torch import nn

torch.manual_seed(0)


class Unit(nn.Module):
    def forward(self, x):
        length = x.pow(2).sum(-1, keepdim=True).sqrt()
        return x / (length + 1e-8)  # <- here


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8, bias=False)
        self.unit = Unit()
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.unit(self.project(x)))


model = Encoder()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for step in range(4):
    x, y = torch.randn(4, 8), torch.randint(0, 2, (4,))
    if step == 2:
        x[1] *= 1e-4
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
