"""float16 autocast with a GradScaler; dropout; three batches are damaged, so three steps are skipped."""

from __future__ import annotations

import torch
from state import arguments, save_digests, seed_all
from torch import nn

args = arguments()
seed_all(1)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
criterion = nn.CrossEntropyLoss()
losses = []

for step in range(args.steps):
    x, y = torch.randn(16, 32), torch.randint(8, (16,))
    if step in (7, 30):
        x[3, 5] = float("inf")
    if step == 21:
        x = x * 4e4  # the first product no longer fits float16
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())

save_digests(args.digests, losses, [model], [optimizer], scaler)
