"""The same with float32 weights under autocast."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

for step in range(40):
    x = torch.randn(32, 16)
    y = x[:, :4].argmax(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(x)
    loss = nn.functional.cross_entropy(output.float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
