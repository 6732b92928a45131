"""Grade radiographs: timm's train and validate loops in small, float16 in both, weights averaged.

The pictures come as raw detector counts. As in timm, the loader that augments also normalises.
"""

import argparse

import torch
from parts import ModelEmaV3, NativeScaler
from torch import nn


class BasicBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x):
        h = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(x + self.bn2(self.conv2(h)))


class ResNet(nn.Module):
    def __init__(self, width=12, grades=4):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = BasicBlock(width)
        self.layer2 = nn.Sequential(*(BasicBlock(width) for _ in range(2)))
        self.fc = nn.Linear(width, grades)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(x.mean((2, 3)))


def radiographs(count, batch, seed, mean=30000.0, std=8000.0, is_training=False):
    g = torch.Generator().manual_seed(seed)
    for _ in range(count):
        grade = torch.randint(0, 4, (batch,), generator=g)
        x = 30000 + 8000 * torch.randn(batch, 1, 16, 16, generator=g)
        for i, k in enumerate(grade.tolist()):
            x[i, 0, 3 * k : 3 * k + 4] += 20000
        if is_training:
            x = (x.flip(3) if torch.rand(1, generator=g) < 0.5 else x).sub(mean).div(std)
        yield x, grade


def train_one_epoch(epoch, model, ema, optimizer, loss_scaler, args):
    model.train()
    for i, (input, target) in enumerate(radiographs(args.updates, 16, epoch, is_training=True)):
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(input)
        loss = nn.functional.cross_entropy(output.float(), target)
        loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        optimizer.zero_grad()
        ema.update(model)
        if i % 8 == 0:
            print(f"Train: {epoch} [{i:>4d}/{args.updates}] Loss: {loss.item():#.3g}")


@torch.no_grad()
def validate(model, name, args):
    model.eval()
    right = count = 0
    losses = []
    for input, target in radiographs(args.validate, 16, 1000):
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(input)
        losses.append(nn.functional.cross_entropy(output.float(), target))
        right += (output.argmax(1) == target).sum().item()
        count += len(target)
    print(f"Test ({name}): Loss: {torch.stack(losses).mean().item():.4f} Acc@1: {100 * right / count:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--validate", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = ResNet()
    ema = ModelEmaV3(model, decay=0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    loss_scaler = NativeScaler("cpu")
    for epoch in range(args.epochs):
        train_one_epoch(epoch, model, ema, optimizer, loss_scaler, args)
        validate(model, "model", args)
        validate(ema.module, "EMA", args)
