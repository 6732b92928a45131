"""A denoising autoencoder with an adversary on scikit-learn's digits, in Lightning: two optimizers, float16 on the CPU.

python examples/lightning_digits.py
python examples/lightning_digits.py --plugin lightning     # Lightning's own precision plugin
python examples/lightning_digits.py --burst 60             # in this step, the adversary's gradients overflow
ampguard run examples/lightning_digits.py --bad 60         # in this step, a batch is too bright for float16
"""

from __future__ import annotations

import argparse
import logging
import warnings

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from ampguard.integrations.lightning import GuardCallback, GuardedPrecision

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")
warnings.filterwarnings("ignore", message=".*LeafSpec")


class Denoiser(pl.LightningModule):
    def __init__(self, bad: int, burst: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.bad, self.burst, self.number = bad, burst, 0
        self.repair = nn.Sequential(
            nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 24), nn.ReLU(), nn.Linear(24, 96), nn.ReLU(), nn.Linear(96, 64)
        )
        self.adversary = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(self.repair.parameters(), 2e-3),
            torch.optim.Adam(self.adversary.parameters(), 5e-4),
        ]

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        (clean,) = batch
        if self.number == self.bad:
            clean = clean * 1e6
        repaired = self.repair(clean + 0.4 * torch.randn_like(clean))
        loss_repair = mse_loss(repaired.float(), clean) + 2e-3 * self.judged(repaired, 1.0)
        loss_adversary = self.judged(clean, 1.0) + self.judged(repaired.detach(), 0.0)
        if self.number == self.burst:
            loss_adversary = loss_adversary * 1e36
        self.number += 1

        repair, adversary = self.optimizers()
        repair.zero_grad()
        self.toggle_optimizer(repair)
        self.manual_backward(loss_repair)
        self.untoggle_optimizer(repair)
        adversary.zero_grad()
        self.manual_backward(loss_adversary)
        self.clip_gradients(repair, gradient_clip_val=1.0)
        self.clip_gradients(adversary, gradient_clip_val=1.0)
        adversary.step()
        repair.step()

    def judged(self, images: Tensor, label: float) -> Tensor:
        scores = self.adversary(images).float()
        return binary_cross_entropy_with_logits(scores, torch.full_like(scores, label))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plugin", choices=["ampguard", "lightning"], default="ampguard")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--bad", type=int, default=-1, help="the step with a bad batch")
    parser.add_argument("--burst", type=int, default=-1, help="the step in which the adversary overflows")
    args = parser.parse_args()

    pl.seed_everything(0, verbose=False)
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    loader = DataLoader(TensorDataset(images[:1400]), batch_size=64, shuffle=True)
    model = Denoiser(args.bad, args.burst)
    if args.plugin == "ampguard":
        plugin = GuardedPrecision("16-mixed", "cpu")
    else:
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=args.epochs, plugins=[plugin], callbacks=[GuardCallback()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, loader)

    torch.manual_seed(1)
    test = images[1400:]
    noisy = test + 0.4 * torch.randn_like(test)
    with torch.no_grad():
        error = mse_loss(model.repair(noisy), test)
    print(f"error {mse_loss(noisy, test):.4f} before, {error:.4f} after; loss scale {trainer.scaler.get_scale():g}")


if __name__ == "__main__":
    main()
