"""A margin between two distances, where an unreachable node is at infinity: Inf - Inf is NaN."""

import torch
from torch import nn

torch.manual_seed(0)


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.cost = nn.Linear(3, 1)

    def forward(self, near, far, reachable):
        near = self.cost(near).squeeze(-1).masked_fill(~reachable[0], float("inf"))
        far = self.cost(far).squeeze(-1).masked_fill(~reachable[1], float("inf"))
        margin = near - far  # <- here
        return nn.functional.softplus(margin.clamp(-10, 10)).mean()


model = Ranker()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    unreachable = torch.tensor([4, 4 if step == 1 else 2])
    reachable = torch.arange(6)[None] != unreachable[:, None]
    loss = model(torch.randn(6, 3), torch.randn(6, 3), reachable)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
