"""timm's train script in small, in float16: accumulation by need_update, adaptive clipping, averaged weights, evaluation."""

import argparse

import torch
from parts import ModelEmaV3, NativeScaler
from torch import nn


class Net(nn.Module):
    def __init__(self, classes=6, width=24):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(16, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.drop(self.body(self.stem(x)).mean((2, 3))))


def shapes(count, batch, seed, classes=6):
    g = torch.Generator().manual_seed(seed)
    patterns = torch.randn(classes, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    for _ in range(count):
        y = torch.randint(0, classes, (batch,), generator=g)
        yield patterns[y] + 0.5 * torch.randn(batch, 1, 16, 16, generator=g), y


def train_one_epoch(epoch, model, ema, optimizer, schedule, loss_scaler, args):
    model.train()
    batches = args.updates * args.grad_accum_steps
    for i, (input, target) in enumerate(shapes(batches, 8, 10 + epoch)):
        need_update = (i + 1) % args.grad_accum_steps == 0
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(input), target, label_smoothing=0.1) / args.grad_accum_steps
        loss_scaler(
            loss,
            optimizer,
            clip_grad=args.clip_grad,
            clip_mode="agc",
            parameters=list(model.parameters())[:-2],
            need_update=need_update,
        )
        if need_update:
            optimizer.zero_grad()
            ema.update(model)
        if i % 20 == 0:
            print(f"Train: {epoch} [{i}/{batches}] Loss: {loss.item() * args.grad_accum_steps:.3f}")
    schedule.step()


@torch.inference_mode()
def validate(model, name):
    model.eval()
    right = count = 0
    for input, target in shapes(4, 32, 999):
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(input)
        right += (output.argmax(1) == target).sum().item()
        count += len(target)
    print(f"Test ({name}): Acc@1: {100 * right / count:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--grad-accum-steps", type=int, default=3)
    parser.add_argument("--clip-grad", type=float, default=0.02)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Net()
    ema = ModelEmaV3(model, decay=0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    loss_scaler = NativeScaler("cpu")
    for epoch in range(args.epochs):
        train_one_epoch(epoch, model, ema, optimizer, schedule, loss_scaler, args)
        validate(model, "model")
        validate(ema.module, "EMA")
