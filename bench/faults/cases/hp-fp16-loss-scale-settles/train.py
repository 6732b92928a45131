import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class WindowMLP(nn.Module):
    def __init__(self, classes=6):
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.stages = nn.Sequential(
            *[nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)]
        )
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        for stage in self.stages:
            x = x + stage(x)
        return self.head(x.mean(1))


class NativeScaler:
    def __init__(self):
        self._scaler = torch.amp.GradScaler("cpu")

    def __call__(self, loss, optimizer, clip_grad, parameters):
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
        self._scaler.step(optimizer)
        self._scaler.update()
        return norm

    @property
    def scale(self):
        return self._scaler.get_scale()


def train_one_epoch(model, criterion, loader, optimizer, epoch, loss_scaler):
    model.train()
    for idx, (samples, targets) in enumerate(loader):
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = model(samples)
        loss = criterion(outputs, targets)
        optimizer.zero_grad()
        grad_norm = loss_scaler(loss, optimizer, clip_grad=5.0, parameters=model.parameters())
        if idx % 4 == 0:
            print(
                f"Train: [{epoch}][{idx}/{len(loader)}]\tloss {loss.item():.4f}\tgrad_norm {grad_norm:.4f}\tloss_scale {loss_scaler.scale:.1f}"
            )
    return loss.item()


@torch.no_grad()
def validate(model, criterion, loader):
    model.eval()
    total = 0.0
    for samples, targets in loader:
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = model(samples)
        total += criterion(outputs, targets).item()
    return total / len(loader)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    y = torch.randint(0, 6, (128,))
    x = torch.randn(128, 3, 16, 16) + torch.randn(6, 3, 16, 16)[y]
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    model, criterion = WindowMLP(), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loss_scaler = NativeScaler()
    for epoch in range(2):
        last = train_one_epoch(model, criterion, loader, optimizer, epoch, loss_scaler)
        print(f"epoch {epoch} val loss {validate(model, criterion, loader):.4f}")
    print(f"final loss {last:.4f}")


if __name__ == "__main__":
    main()
