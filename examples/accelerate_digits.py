"""Two networks with an optimizer each, clipped, in Hugging Face Accelerate: float16 on the CPU.

python examples/accelerate_digits.py
python examples/accelerate_digits.py --plain      # Accelerate's own, float32 on the CPU under the name of fp16
python examples/accelerate_digits.py --scaler     # Accelerate's own, with its GradScaler switched on
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ampguard.integrations.hf import prepare


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--scaler", action="store_true")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    if args.scaler:
        accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu")
    elif not args.plain:
        prepare(accelerator)

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    body = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten()
    )
    head = nn.Linear(512, 10)
    optimizers = [torch.optim.SGD(body.parameters(), 0.1), torch.optim.SGD(head.parameters(), 0.1)]
    loader = DataLoader(TensorDataset(images[:1400], labels[:1400]), batch_size=64, shuffle=True)
    body, head, of_body, of_head, loader = accelerator.prepare(body, head, *optimizers, loader)

    for epoch in range(args.epochs):
        for x, y in loader:
            loss = nn.functional.cross_entropy(head(body(x)), y)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_([*body.parameters(), *head.parameters()], 1.0)
            for optimizer in (of_body, of_head):
                optimizer.step()
                optimizer.zero_grad()
        print(f"epoch {epoch + 1}  loss {loss:.3f}  norm {norm:.3f}")

    with torch.no_grad():
        right = (head(body(images[1400:])).argmax(1) == labels[1400:]).float().mean()
    scale = accelerator.scaler.get_scale() if accelerator.scaler else 1
    print(f"held-out accuracy {right:.1%}, loss scale {scale:g}")


if __name__ == "__main__":
    main()
