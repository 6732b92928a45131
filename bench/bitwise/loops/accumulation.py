"""float16 with four micro-batches a step, clipping and a schedule; one damaged micro-batch spoils its window."""

from __future__ import annotations

import torch
from state import arguments, save_digests, seed_all
from torch import nn

ACCUMULATE = 4

args = arguments()
seed_all(4)
model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Dropout2d(0.1), nn.Flatten(), nn.Linear(8 * 64, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.9)
scaler = torch.amp.GradScaler("cpu", growth_interval=15)
losses = []

for micro_step in range(args.steps * ACCUMULATE):
    x, y = torch.rand(6, 3, 8, 8), torch.randint(5, (6,))
    if micro_step in (34, 111):
        x[2] = float("nan")
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x).float(), y) / ACCUMULATE
    scaler.scale(loss).backward()
    losses.append(loss.item())
    if (micro_step + 1) % ACCUMULATE == 0:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:
            schedule.step()
        optimizer.zero_grad()

save_digests(args.digests, losses, [model], [optimizer], scaler)
