"""The same with a divisor of at least 1."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def masked_mse(prediction, target, mask):
    error = (prediction - target).pow(2) * mask
    return error.sum() / mask.sum().clamp(min=1)


for step in range(4):
    x, y = torch.randn(5, 4), torch.randn(5, 1)
    mask = (torch.rand(5, 1) > 0.3).float() if step != 2 else torch.zeros(5, 1)
    loss = masked_mse(model(x), y, mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
