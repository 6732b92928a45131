"""Adam on float16 weights with its default eps, which is 0 there: small gradients, NaN weights."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).half()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for step in range(6):
    x = torch.randn(32, 16).half()
    y = torch.randint(4, (32,))
    loss = 0.01 * nn.functional.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # <- here
