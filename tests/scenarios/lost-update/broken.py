"""Weights in bfloat16 and a small learning rate: updates are smaller than half of the weights' spacing."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)).to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

for step in range(40):
    x = torch.randn(32, 16, dtype=torch.bfloat16)
    y = x[:, :4].argmax(1)
    loss = nn.functional.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # <- here
