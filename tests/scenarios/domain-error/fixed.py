"""The same with a variance from softplus, which is never 0."""

import torch
from torch import nn

torch.manual_seed(0)


class Gaussian(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.mean = nn.Linear(8, 1)
        self.variance = nn.Linear(8, 1)

    def forward(self, x, y):
        h = torch.tanh(self.body(x))
        mean, variance = self.mean(h), nn.functional.softplus(self.variance(h)) + 1e-4
        log_variance = torch.log(variance)
        return (log_variance + (y - mean).pow(2) / (variance + 1.0)).mean()


model = Gaussian()
with torch.no_grad():
    model.variance.bias.fill_(2.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    if step == 2:
        with torch.no_grad():
            model.variance.bias.fill_(-2.0)
    loss = model(torch.randn(8, 4), torch.randn(8, 1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
