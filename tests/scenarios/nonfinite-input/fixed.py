"""The same with the missing value filled in where the table is read."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
table = torch.randn(32, 6)
table[21, 3] = float("nan")
table = torch.nan_to_num(table, nan=0.0)
prices = torch.randn(32, 1)


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(6, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        h = torch.relu(self.hidden(x))
        return self.out(h)


model = Regressor()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x, y in DataLoader(TensorDataset(table, prices), batch_size=8):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
