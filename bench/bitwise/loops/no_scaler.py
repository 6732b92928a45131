"""float32 without a scaler; the loop drops a batch whose loss is not finite."""

from __future__ import annotations

import math
import random

import numpy as np
import torch
from state import arguments, save_digests, seed_all
from torch import Tensor, nn


class Gaussian(nn.Module):
    """Predicts a mean and a variance; the likelihood takes the logarithm of the variance as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.1))
        self.mean = nn.Linear(32, 1)
        self.variance = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return self.mean(hidden), self.variance(hidden) ** 2


args = arguments()
seed_all(2)
model = Gaussian()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
losses = []

for step in range(args.steps):
    x = torch.from_numpy(np.random.randn(24, 12).astype("float32")) * random.uniform(0.5, 1.5)
    y = x.sum(dim=1, keepdim=True)
    weights = torch.ones(24)
    if step in (11, 33):
        weights.zero_()  # nothing to average over
    if step == 20:
        x[0, 0] = float("nan")
    mean, variance = model(x)
    nll = 0.5 * (torch.log(variance + 1e-3) + (y - mean) ** 2 / (variance + 1e-3)).squeeze(1)
    loss = (nll * weights).sum() / weights.sum()
    losses.append(loss.item())
    if not math.isfinite(loss.item()):
        continue
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

save_digests(args.digests, losses, [model], [optimizer])
