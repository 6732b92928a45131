"""The same from a checkpoint of a healthy step."""

import torch
from torch import nn

torch.manual_seed(0)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * self.gamma


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.norm = Scaled()
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.norm(self.body(x)))


model = Net()
checkpoint = {name: value.clone() for name, value in model.state_dict().items()}
model.load_state_dict(checkpoint)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    loss = nn.functional.cross_entropy(model(torch.randn(6, 4)), torch.randint(0, 3, (6,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
