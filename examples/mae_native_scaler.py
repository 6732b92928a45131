"""A masked autoencoder on scikit-learn's photographs, with the scaler that MAE, Swin, SimMIM and VMamba call, over the engine.

The loop is theirs: accumulation, clipping, one call for each micro-batch, the scaler's state in the checkpoint.

python examples/mae_native_scaler.py
python examples/mae_native_scaler.py --amp-opt-level O2
python examples/mae_native_scaler.py --disable_amp
ampguard run examples/mae_native_scaler.py
"""

from __future__ import annotations

import argparse
import io
import math
import sys

import torch
from mae_model import MaskedAutoencoderViT
from sklearn.datasets import load_sample_images
from torch import Tensor

from ampguard.integrations.arguments import add_amp_arguments, amp_of
from ampguard.integrations.timm import NativeScalerWithGradNormCount as NativeScaler

SIZE, BATCH = 48, 8


def batches(count: int, generator: torch.Generator) -> list[Tensor]:
    """Random crops of the photographs, in turn."""
    photos = [torch.from_numpy(image.copy()).permute(2, 0, 1) / 255 - 0.45 for image in load_sample_images().images]

    def crop(photo: Tensor) -> Tensor:
        top = int(torch.randint(photo.shape[1] - SIZE, (), generator=generator))
        left = int(torch.randint(photo.shape[2] - SIZE, (), generator=generator))
        return photo[:, top : top + SIZE, left : left + SIZE]

    return [torch.stack([crop(photos[i % len(photos)]) for i in range(BATCH)]) for _ in range(count)]


def get_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("--steps", default=30, type=int, help="micro-batches in an epoch")
    parser.add_argument("--accum_iter", default=2, type=int)
    parser.add_argument("--clip_grad", default=1.0, type=float)
    parser.add_argument("--lr", default=2e-3, type=float)
    add_amp_arguments(parser)
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = MaskedAutoencoderViT(img_size=SIZE, embed_dim=128, num_heads=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.05)
    amp = amp_of(args, "cpu")
    amp.prepare(model, optimizer)
    loss_scaler = NativeScaler(precision=amp)

    for epoch in range(args.epochs):
        total, norm = 0.0, None
        for step, samples in enumerate(batches(args.steps, generator)):
            with amp.autocast():
                loss, _, _ = model(samples, mask_ratio=0.75)
            if not math.isfinite(loss.item()):
                print(f"Loss is {loss.item()}, stopping training")
                sys.exit(1)
            total += loss.item()
            window_ends = (step + 1) % args.accum_iter == 0
            returned = loss_scaler(
                loss / args.accum_iter,
                optimizer,
                clip_grad=args.clip_grad,
                parameters=model.parameters(),
                update_grad=window_ends,
            )
            if window_ends:
                optimizer.zero_grad()
                norm = returned
        scale = loss_scaler.state_dict()["scale"]
        print(f"epoch {epoch}  loss {total / args.steps:.4f}  grad norm {float(norm):.3f}  loss scale {scale:g}")

    file = io.BytesIO()  # a checkpoint as MAE writes it
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": loss_scaler.state_dict()}, file
    )
    print(f"checkpoint {file.tell() / 2**20:.1f} MiB, precision {amp.name}")


if __name__ == "__main__":
    main(get_args())
