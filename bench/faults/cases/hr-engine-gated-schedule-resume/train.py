import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from engine import NativeScaler, evaluate, train_one_epoch


class Net(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 12, 3, 2, 1), nn.BatchNorm2d(12), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(12, 24, 3, 2, 1), nn.BatchNorm2d(24), nn.ReLU())
        self.fc = nn.Linear(24, classes)

    def forward(self, x):
        return self.fc(self.body(self.stem(x)).mean((2, 3)))


def build(args):
    model = Net()
    for parameter in model.stem.parameters():  # the stem stays as it is
        parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.total_updates)
    return model, optimizer, scheduler, NativeScaler(init_scale=2.0**22)


def loaders():
    y = torch.randint(0, 4, (400,))
    x = torch.randn(400, 1, 16, 16)
    for i, k in enumerate(y.tolist()):
        x[i, 0, 8 * (k // 2) : 8 * (k // 2) + 8, 8 * (k % 2) : 8 * (k % 2) + 8] += 1.5
        x[i, 0, :: k + 1] += 0.5
    train = DataLoader(TensorDataset(x[:320], y[:320]), batch_size=16, shuffle=True)
    return train, DataLoader(TensorDataset(x[320:], y[320:]), batch_size=40)


def run(args, checkpoint, epochs):
    model, optimizer, scheduler, loss_scaler = build(args)
    parts = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler, "amp_scaler": loss_scaler}
    start = 0
    if checkpoint.is_file():
        state = torch.load(checkpoint, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        start = state["epoch"] + 1
    train, val = loaders()
    for epoch in range(start, epochs):
        loss, norm, updates = train_one_epoch(
            model, train, nn.CrossEntropyLoss(), optimizer, loss_scaler, scheduler, args.accum_steps
        )
        accuracy = evaluate(model, val)
        scale = loss_scaler.state_dict()["scale"]
        print(f"epoch {epoch} loss {loss:.4f} norm {norm:.3f} updates {updates} scale {scale:.0f} acc {accuracy:.3f}")
        torch.save({**{name: part.state_dict() for name, part in parts.items()}, "epoch": epoch}, checkpoint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--accum-steps", type=int, default=2)
    parser.add_argument("--total-updates", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(27)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint.pth"
        run(args, checkpoint, 2)
        run(args, checkpoint, 5)
