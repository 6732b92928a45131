"""A weight on the loss that doubles each step, after a while: the gradients overflow at every scale the scaler tries."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)

weight = 1.0
for step in range(40):
    if step >= 8:
        weight *= 3.0
    x, y = torch.randn(16, 8), torch.randn(16, 4)
    with torch.autocast("cpu", dtype=torch.float16):
        output = model(x)
    loss = weight * (output.float() - y).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
