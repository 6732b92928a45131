"""The same; such samples count nothing."""

import torch
from torch import nn

torch.manual_seed(0)


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(4, 8)
        self.out = nn.Linear(8, 6)

    def forward(self, frames):
        return self.out(self.rnn(frames)[0]).log_softmax(-1)


model = Recognizer()
criterion = nn.CTCLoss(zero_infinity=True)
optimizer = torch.optim.Adam(model.parameters())
for step in range(3):
    frames = torch.randn(6, 3, 4)
    labels = torch.randint(1, 6, (3, 1)).expand(3, 5)
    frame_counts = torch.tensor([6, 6, 3 if step == 1 else 6])
    label_counts = torch.tensor([3, 2, 3])
    loss = criterion(model(frames), labels, frame_counts, label_counts)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
