"""A triplet loss measures distances by hand: the loss of two equal samples is fine, and its derivative is 0 / 0."""

import torch
from torch import nn

torch.manual_seed(0)


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))

    def distance(self, a, b):
        return (a - b).pow(2).sum(dim=-1).sqrt()  # <- here

    def forward(self, anchor, positive, negative):
        anchor, positive, negative = self.net(anchor), self.net(positive), self.net(negative)
        return (self.distance(anchor, positive) - self.distance(anchor, negative) + 1.0).clamp(min=0.0)


model = Embedder()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    anchor, positive, negative = torch.randn(3, 5, 4)
    if step == 2:
        positive[3] = anchor[3]
    loss = model(anchor, positive, negative).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
