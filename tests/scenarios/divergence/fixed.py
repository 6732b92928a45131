"""The same schedule within what the model can bear."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 12 else 1.5)

for step in range(40):
    x = torch.randn(64, 8)
    y = x.sum(1, keepdim=True)
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
