"""The criterion stands outside the autocast region: the loss is float16, and 65536 times a float16 is Inf."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(4):
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x)
    loss = nn.functional.cross_entropy(logits, y)
    scaler.scale(loss).backward()  # <- here
    scaler.step(optimizer)
    scaler.update()
