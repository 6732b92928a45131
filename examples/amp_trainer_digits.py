"""detectron2's and FastReID's trainer on scikit-learn's digits: a model that returns losses, hooks, flat buffers.

The optimizer updates one flat buffer instead of the parameters, as FastReID's does. With PyTorch 2 its own trainer stops
there with "No inf checks were recorded for this optimizer", and with AMP off no weight ever moves.

python examples/amp_trainer_digits.py
python examples/amp_trainer_digits.py --disable-amp
ampguard run examples/amp_trainer_digits.py --bad 150     # one batch that float16 does not hold: the error says where
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from ampguard.integrations.d2 import AMPTrainer


class DigitNet(nn.Module):
    """Returns a dictionary of losses in training, scores in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(),
        )  # fmt: skip
        self.heads = nn.Linear(32 * 16, 10)

    def forward(self, data: tuple[Tensor, Tensor] | Tensor) -> Any:
        if not self.training:
            return self.heads(self.backbone(data))
        images, labels = data
        features = self.backbone(images)
        scores = self.heads(features)
        spread = features.float().norm(dim=1).sub(8).pow(2).mean()
        return {"loss_cls": nn.functional.cross_entropy(scores, labels), "loss_norm": 1e-3 * spread}


class FlatParams:
    """All weights in one buffer, all gradients in another; FastReID's `param_wrapper`."""

    def __init__(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        self.buffer = torch.cat([p.detach().reshape(-1) for p in parameters])
        self.buffer.grad = torch.zeros_like(self.buffer)
        sizes = [p.numel() for p in parameters]
        values, gradients = self.buffer.split(sizes), self.buffer.grad.split(sizes)
        for p, value, gradient in zip(parameters, values, gradients, strict=True):
            p.data, p.grad = value.view(p.shape), gradient.view(p.shape)


class Printer:
    """A hook."""

    trainer: AMPTrainer

    def after_step(self) -> None:
        if self.trainer.iter % 60 == 59:
            now = self.trainer.storage.latest()
            scale = self.trainer.grad_scaler.get_scale()
            print(f"iter {self.trainer.iter + 1:3d}  total_loss {now['total_loss']:.4f}  loss scale {scale:g}")


def batches(images: Tensor, labels: Tensor, bad: int) -> Iterator[tuple[Tensor, Tensor]]:
    number = 0
    while True:
        for rows in torch.randperm(1400).split(64):
            yield images[rows] * (1e6 if number == bad else 1), labels[rows]
            number += 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--disable-amp", action="store_true")
    parser.add_argument("--bad", type=int, default=-1, help="the iteration with a bad batch")
    parser.add_argument("--iterations", type=int, default=240)
    args = parser.parse_args()

    torch.manual_seed(0)
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    model = DigitNet()
    wrapper = FlatParams(model)
    optimizer = torch.optim.Adam([wrapper.buffer], lr=3e-3)
    cfg = SimpleNamespace(SOLVER=SimpleNamespace(AMP=SimpleNamespace(ENABLED=not args.disable_amp)))

    trainer = AMPTrainer.from_config(cfg, model, batches(images, labels, args.bad), optimizer, wrapper)
    trainer.register_hooks([Printer()])
    trainer.train(0, args.iterations)

    model.eval()
    with torch.no_grad():
        right = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean()
    saved = trainer.state_dict()["grad_scaler"]["scale"]
    print(f"held-out accuracy {right:.1%}, loss scale in the checkpoint {saved:g}")


if __name__ == "__main__":
    main()
