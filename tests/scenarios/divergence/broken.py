"""A learning rate that is raised by a schedule beyond what the model can bear: the loss climbs until it overflows."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 12 else 30.0)

for step in range(40):
    x = torch.randn(64, 8)
    y = x.sum(1, keepdim=True)
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
