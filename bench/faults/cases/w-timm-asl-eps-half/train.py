"""Tag pictures with several labels each: timm's train script in small, asymmetric loss, float16."""

import argparse

import torch
from parts import NativeScaler
from torch import nn


class AsymmetricLoss(nn.Module):
    """Few of many labels apply to a picture; easy negatives hardly count."""

    def __init__(self, gamma_neg=4, gamma_pos=1, clip=0.05, eps=1e-8):
        super().__init__()
        self.gamma_neg, self.gamma_pos, self.clip, self.eps = gamma_neg, gamma_pos, clip, eps

    def forward(self, x, y):
        xs_pos = torch.sigmoid(x)
        xs_neg = (1 - xs_pos + self.clip).clamp(max=1)
        los_pos = y * torch.log(xs_pos.clamp(min=self.eps))
        los_neg = (1 - y) * torch.log(xs_neg.clamp(min=self.eps))
        loss = los_pos + los_neg
        with torch.no_grad():
            pt = xs_pos * y + xs_neg * (1 - y)
            weight = torch.pow(1 - pt, self.gamma_pos * y + self.gamma_neg * (1 - y))
        return -(loss * weight).sum()


class ConvStem(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3, stride=2, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(self.bn(self.conv(x)))


class Tagger(nn.Module):
    def __init__(self, tags=12):
        super().__init__()
        self.stem = ConvStem()
        self.body = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(32, tags)

    def forward(self, x):
        return self.head(self.body(self.stem(x)).flatten(1))


def loader(count, batch, seed, tags=12):
    g = torch.Generator().manual_seed(seed)
    patterns = torch.randn(tags, 1, 16, 16, generator=g)
    for _ in range(count):
        y = (torch.rand(batch, tags, generator=g) < 0.15).float()
        y[:, 0] = 1.0  # every picture is a picture
        yield torch.einsum("bt,tchw->bchw", y, patterns) + 0.3 * torch.randn(batch, 1, 16, 16, generator=g), y


def train_one_epoch(epoch, model, optimizer, loss_fn, loss_scaler, args):
    model.train()
    for i, (input, target) in enumerate(loader(args.updates, 16, args.seed)):
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(input)
            loss = loss_fn(output, target)
        loss_scaler(loss, optimizer, clip_grad=args.clip_grad, parameters=model.parameters())
        optimizer.zero_grad()
        if i % 10 == 0:
            print(f"Train: {epoch} [{i:>4d}/{args.updates}] Loss: {loss.item():#.3g}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=80)
    parser.add_argument("--lr", type=float, default=0.8)
    parser.add_argument("--clip-grad", type=float, default=None)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    train_one_epoch(0, model, optimizer, AsymmetricLoss(), NativeScaler("cpu"), args)
