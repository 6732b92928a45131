"""A detector's box loss over the positive anchors: one image has none, and the mean of nothing is NaN."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(6, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def box_loss(boxes, targets, positive):
    error = (boxes[positive] - targets[positive]).abs()
    return error.mean()  # <- here


for step in range(4):
    anchors, targets = torch.randn(10, 6), torch.randn(10, 4)
    positive = torch.arange(10) % 3 == 0 if step != 2 else torch.zeros(10, dtype=torch.bool)
    loss = box_loss(model(anchors), targets, positive)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
