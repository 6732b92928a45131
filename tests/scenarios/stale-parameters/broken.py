"""The head is replaced for a new task after the optimizer was built; no error comes of it."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


def batch():
    return torch.randn(8, 6), torch.randint(0, 3, (8,))


def loss_of(model):
    x, y = batch()
    with torch.autocast("cpu", dtype=torch.float16):
        return F.cross_entropy(model(x), y)


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model.head = nn.Linear(16, 5)  # <- here
for step in range(6):
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
