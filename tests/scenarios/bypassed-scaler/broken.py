"""Of two optimizers one is stepped past the scaler."""

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
opt_body = torch.optim.SGD(model.body.parameters(), lr=1e-2)
opt_head = torch.optim.SGD(model.head.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for step in range(4):
    opt_body.zero_grad()
    opt_head.zero_grad()
    scaler.scale(loss_of(model)).backward()
    scaler.step(opt_body)
    opt_head.step()  # <- here
    scaler.update()
