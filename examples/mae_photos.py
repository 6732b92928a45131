"""Pre-train a small masked autoencoder in float16 on the two photographs that scikit-learn ships.

Run `python examples/mae_photos.py`, or with `--no_amp` for the same in float32.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterable, Iterator

import torch
from mae_model import MaskedAutoencoderViT
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

IMAGENET_MEAN = torch.tensor([0.485, 0.456, 0.406])
IMAGENET_STD = torch.tensor([0.229, 0.224, 0.225])


class RandomCrops:
    """Batches of random resized crops: 20 to 100 % of the largest square, half of them mirrored."""

    def __init__(self, images: list[Tensor], size: int, batch_size: int, batches: int) -> None:
        self.images, self.size, self.batch_size, self.batches = images, size, batch_size, batches

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.batches):
            yield torch.cat([self.crop(self.images[i % len(self.images)]) for i in range(self.batch_size)])

    def crop(self, image: Tensor) -> Tensor:
        _, height, width = image.shape
        side = int(min(height, width) * torch.empty(()).uniform_(0.2, 1.0).sqrt())
        top = int(torch.randint(height - side + 1, ()))
        left = int(torch.randint(width - side + 1, ()))
        patch = image[None, :, top : top + side, left : left + side]
        patch = nn.functional.interpolate(patch, size=(self.size, self.size), mode="bilinear", antialias=True)
        return patch.flip(3) if torch.rand(()) < 0.5 else patch


class NativeScaler:
    """scale, backward, step, update in one call; returns the gradient norm."""

    def __init__(self, enabled: bool) -> None:
        self._scaler = torch.amp.GradScaler("cpu", enabled=enabled)

    def __call__(self, loss: Tensor, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> Tensor:
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(optimizer)
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        self._scaler.step(optimizer)
        self._scaler.update()
        return norm


def load_photos() -> list[Tensor]:
    photos = []
    for image in load_sample_images().images:
        pixels = torch.from_numpy(image.copy()).float() / 255
        photos.append(((pixels - IMAGENET_MEAN) / IMAGENET_STD).permute(2, 0, 1).contiguous())
    return photos


def adjust_learning_rate(optimizer: torch.optim.Optimizer, epoch: float, args: argparse.Namespace) -> float:
    """Linear warm-up, then half a cosine."""
    if epoch < args.warmup_epochs:
        lr = args.lr * epoch / args.warmup_epochs
    else:
        progress = (epoch - args.warmup_epochs) / (args.epochs - args.warmup_epochs)
        lr = args.lr * 0.5 * (1.0 + math.cos(math.pi * progress))
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def train_one_epoch(
    model: nn.Module,
    data_loader: RandomCrops,
    optimizer: torch.optim.Optimizer,
    epoch: int,
    loss_scaler: NativeScaler,
    args: argparse.Namespace,
) -> float:
    model.train()
    total = 0.0
    for step, samples in enumerate(data_loader):
        lr = adjust_learning_rate(optimizer, epoch + step / len(data_loader), args)

        with torch.autocast("cpu", dtype=torch.float16, enabled=not args.no_amp):
            loss, _, _ = model(samples, mask_ratio=args.mask_ratio)

        loss_value = loss.item()
        if not math.isfinite(loss_value):
            print(f"Loss is {loss_value}, stopping training")
            sys.exit(1)

        norm = loss_scaler(loss, optimizer, parameters=model.parameters())
        optimizer.zero_grad()
        total += loss_value
        print(f"epoch {epoch:2d} [{step}/{len(data_loader)}]  lr {lr:.5f}  loss {loss_value:.4f}  grad norm {norm:.3f}")
    return total / len(data_loader)


def get_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser("MAE pre-training on two photographs")
    parser.add_argument("--batch_size", default=4, type=int)
    parser.add_argument("--epochs", default=20, type=int)
    parser.add_argument("--steps_per_epoch", default=10, type=int)
    parser.add_argument("--warmup_epochs", default=1, type=int)
    parser.add_argument("--lr", default=0.015, type=float)
    parser.add_argument("--weight_decay", default=0.05, type=float)
    parser.add_argument("--input_size", default=48, type=int)
    parser.add_argument("--mask_ratio", default=0.75, type=float)
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--no_amp", action="store_true", help="train in float32")
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    data_loader = RandomCrops(load_photos(), args.input_size, args.batch_size, args.steps_per_epoch)
    model = MaskedAutoencoderViT(img_size=args.input_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    loss_scaler = NativeScaler(enabled=not args.no_amp)

    start = time.time()
    for epoch in range(args.epochs):
        mean_loss = train_one_epoch(model, data_loader, optimizer, epoch, loss_scaler, args)
        print(f"epoch {epoch:2d} mean loss {mean_loss:.4f}  ({time.time() - start:.1f} s)")


if __name__ == "__main__":
    main(get_args())
