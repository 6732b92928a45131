"""Transfer a small network to another set of classes: timm's loop, everything but the head frozen, float16."""

import argparse

import torch
from parts import NativeScaler
from torch import nn


class Net(nn.Module):
    """A backbone and a classifier that can be replaced, as timm's models have it."""

    def __init__(self, classes=10, width=32):
        super().__init__()
        self.num_features = width
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.Sequential(nn.Conv2d(16, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU())
        self.head = nn.Linear(width, classes)

    def get_classifier(self):
        return self.head

    def reset_classifier(self, classes):
        self.head = nn.Linear(self.num_features, classes)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def shapes(count, batch, classes, seed):
    g = torch.Generator().manual_seed(seed)
    patterns = torch.randn(classes, 1, 16, 16, generator=g)
    for _ in range(count):
        y = torch.randint(0, classes, (batch,), generator=g)
        yield patterns[y] + 0.4 * torch.randn(batch, 1, 16, 16, generator=g), y


def train_one_epoch(name, model, optimizer, loss_scaler, data, clip_grad=1.0):
    model.train()
    for i, (input, target) in enumerate(data):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(input).float(), target)
        loss_scaler(loss, optimizer, clip_grad=clip_grad, parameters=model.parameters())
        optimizer.zero_grad()
        if i % 6 == 0:
            print(f"{name} [{i}] Loss: {loss.item():.3f}")


def main(args):
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model, loss_scaler = Net(args.classes), NativeScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=args.weight_decay)
    train_one_epoch("pretrain", model, optimizer, loss_scaler, shapes(args.updates, 16, args.classes, 1))

    for parameter in model.parameters():
        parameter.requires_grad = False
    for parameter in model.get_classifier().parameters():
        parameter.requires_grad = True
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=args.lr, momentum=0.9)
    model.reset_classifier(args.new_classes)
    train_one_epoch("transfer", model, optimizer, loss_scaler, shapes(args.updates, 16, args.new_classes, 2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--new-classes", type=int, default=6)
    parser.add_argument("--updates", type=int, default=18)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    main(parser.parse_args())
