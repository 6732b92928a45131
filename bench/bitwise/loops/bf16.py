"""bfloat16 autocast with gradient clipping; two steps fail in the loss and are left out by the loop."""

from __future__ import annotations

import torch
from state import arguments, save_digests, seed_all
from torch import nn

args = arguments()
seed_all(3)
layer = nn.TransformerEncoderLayer(32, 4, dim_feedforward=64, dropout=0.1, batch_first=True)
model = nn.Sequential(nn.Linear(10, 32), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []

for step in range(args.steps):
    x = torch.randn(4, 9, 10)
    labels = torch.randint(10, (4, 9))
    if step in (13, 40):
        labels.fill_(-100)  # every target is ignored
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    losses.append(loss.item())
    optimizer.zero_grad()
    if torch.isfinite(loss):
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

save_digests(args.digests, losses, [model], [optimizer])
