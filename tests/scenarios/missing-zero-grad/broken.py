"""Nobody clears the gradients."""

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
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(6):
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()  # <- here
