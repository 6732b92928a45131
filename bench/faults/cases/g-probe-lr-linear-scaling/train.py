"""Least-squares probe on frozen features. The recipe was for batch 8; the learning rate follows the batch size."""

import argparse
import math

import torch
import torch.nn.functional as F

from features import Probe


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--base-lr", type=float, default=0.03)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=150)
    return parser.parse_args()


class Meter:
    def __init__(self, beta=0.8):
        self.beta, self.value = beta, None

    def update(self, v):
        self.value = v if self.value is None else self.beta * self.value + (1 - self.beta) * v


def recordings(args, classes=6):
    g = torch.Generator().manual_seed(42)
    shapes = torch.randn(classes, 2, 64, generator=g)
    for _ in range(args.steps):
        y = torch.randint(0, classes, (args.batch_size,), generator=g)
        yield shapes[y] + 0.7 * torch.randn(args.batch_size, 2, 64, generator=g), y


def main(args):
    torch.set_num_threads(1)
    torch.manual_seed(23)
    model = Probe(96, 6)
    lr = args.base_lr * args.batch_size / 8
    optimizer = torch.optim.SGD(model.readout.parameters(), lr=lr, momentum=args.momentum)
    meter = Meter()
    for step, (x, y) in enumerate(recordings(args)):
        error = model(x) - F.one_hot(y, 6)
        loss = (error * error).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meter.update(loss.item())
        if step % 10 == 0:
            print(f"[{step}/{args.steps}] lr {lr:.3f} loss {meter.value:.4g}")
        if not math.isfinite(meter.value):
            print("Loss is not finite, stopping training")
            break


if __name__ == "__main__":
    main(parse_args())
