import argparse

import torch
import torch.nn.functional as F
from torch import nn

from edsr import EDSR

parser = argparse.ArgumentParser(description="EDSR and MDSR")
parser.add_argument("--rgb_range", type=int, default=255, help="maximum value of RGB")
parser.add_argument("--patch_size", type=int, default=48)
parser.add_argument("--batch_size", type=int, default=4)
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--print_every", type=int, default=4)
parser.add_argument("--test_every", type=int, default=24, help="do test per every N batches")
args = parser.parse_args()


class Data:
    """Smooth random images, one channel."""

    def __init__(self, args, g):
        self.args, self.g = args, g

    def __iter__(self):
        for _ in range(self.args.test_every):
            low = torch.rand(self.args.batch_size, 1, 9, 9, generator=self.g)
            hr = F.interpolate(low, size=2 * self.args.patch_size, mode="bicubic").clamp(0, 1) * self.args.rgb_range
            yield F.avg_pool2d(hr, 2), hr


class Trainer:
    def __init__(self, args, loader, model, loss):
        self.args, self.loader, self.model, self.loss = args, loader, model, loss
        self.optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
        self.scaler = torch.amp.GradScaler("cpu")

    def train(self):
        self.model.train()
        skipped = 0
        for batch, (lr, hr) in enumerate(self.loader):
            self.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                sr = self.model(lr)
                loss = self.loss(sr, hr)
            self.scaler.scale(loss).backward()
            scale = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            skipped += self.scaler.get_scale() < scale
            if (batch + 1) % self.args.print_every == 0:
                print(
                    f"[{batch + 1}/{self.args.test_every}]\t[L2: {loss.item():.1f}]\tscale {scale:g}\tskipped {skipped}"
                )


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(1)
    Trainer(args, Data(args, torch.Generator().manual_seed(3)), EDSR(), nn.MSELoss(reduction="sum")).train()
