import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset, random_split

from layers import Block

torch.set_num_threads(1)
torch.manual_seed(10)


class Tabular(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(9, 32), Block(32, 32)])
        self.out = nn.Linear(32, 2)

    def forward(self, x):
        for b in self.blocks:
            x = b(x)
        return self.out(x)


x = torch.randn(200, 9)
y = (x[:, 0] * x[:, 1] + x[:, 2] > 0).long()
train_set, test_set = random_split(TensorDataset(x, y), [161, 39], torch.Generator().manual_seed(0))
train_loader = DataLoader(train_set, batch_size=16, shuffle=True)
test_loader = DataLoader(test_set, batch_size=64)

model = Tabular()
opt = optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(1, 4):
    model.train()
    running = 0.0
    for xb, yb in train_loader:
        loss = nn.functional.cross_entropy(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        running += loss.item()
    print(f"Epoch {epoch}: train loss {running / len(train_loader):.4f}")

model.eval()
with torch.no_grad():
    for xb, yb in test_loader:
        prob = model(xb).softmax(-1)
        print("test accuracy", (prob.argmax(-1) == yb).float().mean().item(), "mean prob", prob[:, 1].mean().item())
