"""The same with float32 weights under autocast."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for step in range(6):
    x = torch.randn(32, 16)
    y = torch.randint(4, (32,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(x)
    loss = 0.01 * nn.functional.cross_entropy(output.float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
