"""Regress three properties of a molecule from its fingerprint. Not every property was measured for every molecule."""

import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
PROPS = ["logp", "solubility", "gap"]
WEIGHTS = {"logp": 1.0, "solubility": 0.5, "gap": 2.0}


def load_table(n=256):
    rng = np.random.default_rng(7)
    x = rng.normal(size=(n, 24)).astype("float32")
    w = rng.normal(size=(24, 3)) * 0.3
    y = (x @ w + 0.1 * rng.normal(size=(n, 3))).astype("float32")
    y[203, 1] = np.nan  # no solubility in the source table
    return torch.from_numpy(x), torch.from_numpy(y)


class MultiHead(nn.Module):
    def __init__(self, dim=24, hidden=64):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(dim, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.heads = nn.ModuleDict({p: nn.Linear(hidden, 1) for p in PROPS})

    def forward(self, x):
        h = self.trunk(x)
        return {p: head(h).squeeze(-1) for p, head in self.heads.items()}


def property_loss(pred, target):
    total = 0.0
    for i, p in enumerate(PROPS):
        term = F.mse_loss(pred[p].float(), target[:, i])
        total = total + WEIGHTS[p] * term
    return total


torch.manual_seed(0)
x, y = load_table()
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=False)
net = MultiHead()
optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)

skipped = 0
for epoch in range(3):
    for i, (xb, yb) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pred = net(xb)
            loss = property_loss(pred, yb)
        if not math.isfinite(loss.item()):
            skipped += 1
            continue
        loss.backward()
        optimizer.step()
        if i % 4 == 0:
            print(f"epoch {epoch} iter {i}: loss = {loss.item():.4f}")
print("done, skipped", skipped, "batches")
