"""The same with one key left to every row."""

import torch
from torch import nn

torch.manual_seed(0)


class Attention(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x, padding):
        scores = self.q(x) @ self.k(x).transpose(-2, -1) / 8**0.5
        padding = padding.clone()
        padding[:, 0] = False
        scores = scores.masked_fill(padding[:, None, :], float("-inf"))
        weights = scores.softmax(dim=-1)
        return weights @ self.v(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.head = nn.Linear(8, 3)

    def forward(self, x, padding):
        return self.head(self.attention(x, padding).mean(1))


model = Net()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    x, y = torch.randn(4, 5, 8), torch.randint(0, 3, (4,))
    lengths = torch.tensor([5, 4, 0 if step == 1 else 2, 3])
    padding = torch.arange(5)[None] >= lengths[:, None]
    loss = nn.functional.cross_entropy(model(x, padding), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
