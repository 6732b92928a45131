"""A small convolutional network on scikit-learn's digits, in any precision of the engine, with one bad batch on the way.

python examples/engine_digits.py
python examples/engine_digits.py --precision bf16-true --on-nonfinite skip
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import ampguard
from ampguard.engine.policies import Rollback

EPOCHS, BATCH = 3, 64


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 16, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--on-nonfinite", default="rollback", choices=["skip", "raise", "rollback"])
    options = parser.parse_args()

    torch.manual_seed(0)
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    train, held_out = torch.arange(0, 1400), torch.arange(1400, len(labels))

    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(train) // BATCH)
    amp = ampguard.Amp(
        model,
        optimizer,
        precision=options.precision,
        max_grad_norm=1.0,
        schedulers=schedule,
        on_nonfinite=Rollback(every=10) if options.on_nonfinite == "rollback" else options.on_nonfinite,
        eval_precision="fp32",
    )
    for epoch in range(EPOCHS):
        model.train()
        for step, rows in enumerate(train[torch.randperm(len(train))].split(BATCH)):
            x, y = images[rows].clone(), labels[rows]
            if (epoch, step) == (1, 5):
                x[3, 0, 4, 4] = float("nan")  # a broken image
            with amp.autocast():
                loss = nn.functional.cross_entropy(model(x), y)
            amp.backward(loss)
            result = amp.step()

        model.eval()
        with torch.no_grad(), amp.autocast():
            right = (model(images[held_out]).argmax(1) == labels[held_out]).float().mean()
        print(
            f"epoch {epoch}  steps {amp.steps}  loss {loss.item():.4f}  grad norm {result.grad_norm:.3f}  "
            f"loss scale {result.loss_scale:g}  held-out accuracy {right:.1%}"
        )


if __name__ == "__main__":
    main()
