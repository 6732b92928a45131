import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from prune import speedup_model

SPARSITY = 0.5
PRETRAIN_EPOCHS, FINETUNE_EPOCHS = 2, 2


class Block(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x):
        return x + self.fc2(F.relu(self.fc1(self.norm(x))))


class MLP(nn.Module):
    def __init__(self, inputs=20, dim=32, hidden=64, classes=5):
        super().__init__()
        self.stem = nn.Linear(inputs, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(2))
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_data():
    centres = torch.randn(5, 20)
    y = torch.randint(0, 5, (320,))
    return TensorDataset(centres[y] + 3 * torch.randn(320, 20), y)


def train_epoch(model, loader, optimizer, scaler):
    model.train()
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        total += loss.item()
    return total / len(loader)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(1)
    loader = DataLoader(make_data(), batch_size=32, shuffle=True)
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    scaler = torch.amp.GradScaler("cpu")

    for epoch in range(PRETRAIN_EPOCHS):
        print(f"pretrain {epoch}: {train_epoch(model, loader, optimizer, scaler):.4f}")

    speedup_model(model, SPARSITY)
    print("params after pruning:", sum(p.numel() for p in model.parameters()))

    for epoch in range(FINETUNE_EPOCHS):
        print(f"finetune {epoch}: {train_epoch(model, loader, optimizer, scaler):.4f}")


if __name__ == "__main__":
    main()
