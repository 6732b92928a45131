import warnings

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
torch.manual_seed(3)


class CellFrames(Dataset):
    """Fluorescence frames, standardised one by one. Some exposures are blank."""

    def __init__(self, n, seed, blank=()):
        rng = np.random.default_rng(seed)
        self.y = rng.integers(0, 3, n)
        self.x = rng.normal(0.0, 12.0, (n, 1, 16, 16)).astype(np.float32) + 100
        for i, label in enumerate(self.y):
            self.x[i, 0, 2 + 4 * label : 6 + 4 * label, 3:13] += 30
        for i in blank:
            self.x[i] = 0.0

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        frame = self.x[i]
        frame = (frame - frame.mean()) / frame.std()
        return torch.from_numpy(frame), int(self.y[i])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )
        self.body = nn.Sequential(
            nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True)
        )
        self.fc = nn.Linear(32, 3)

    def forward(self, x):
        x = self.stem(x)
        x = self.body(x)
        return self.fc(x.mean((2, 3)))


train_loader = DataLoader(
    CellFrames(192, 0, blank=(117,)),
    batch_size=16,
    shuffle=True,
    num_workers=2,
    generator=torch.Generator().manual_seed(11),
)
val_loader = DataLoader(CellFrames(48, 1), batch_size=16)

model = Net()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
ce = nn.CrossEntropyLoss()

for epoch in range(2):
    model.train()
    for it, (x, y) in enumerate(train_loader):
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(x)
        loss = ce(logits.float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if it % 6 == 0:
            print(f"epoch {epoch} it {it} loss {loss.item():.4f}")

    model.eval()
    total, correct, val_loss = 0, 0, 0.0
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        for x, y in val_loader:
            out = model(x).float()
            val_loss += ce(out, y).item() * len(y)
            correct += (out.argmax(1) == y).sum().item()
            total += len(y)
    print(f"epoch {epoch} val loss {val_loss / total:.4f} acc {correct / total:.3f}")
