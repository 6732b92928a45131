"""A GAN on points of two rings, Lightning's manual optimisation in real float16, done as its documentation says.

Each loss goes through manual_backward, each optimizer is toggled, zeroed and stepped after its own backward, and the
gradients are clipped in the hook that runs after Lightning has unscaled them.
"""

import logging
import warnings

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class RingGAN(L.LightningModule):
    def __init__(self, latent=4, hidden=48):
        super().__init__()
        self.automatic_optimization = False
        self.latent = latent
        self.generator = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, 1))

    def training_step(self, batch, batch_idx):
        opt_g, opt_d = self.optimizers()
        (real,) = batch

        self.toggle_optimizer(opt_d)
        fake = self.generator(torch.randn(len(real), self.latent)).detach()
        loss_d = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake)).mean()
        opt_d.zero_grad()
        self.manual_backward(loss_d)
        opt_d.step()
        self.untoggle_optimizer(opt_d)

        self.toggle_optimizer(opt_g)
        loss_g = F.softplus(-self.discriminator(self.generator(torch.randn(len(real), self.latent)))).mean()
        opt_g.zero_grad()
        self.manual_backward(loss_g)
        opt_g.step()
        self.untoggle_optimizer(opt_g)

        if batch_idx % 10 == 0:
            scale = self.trainer.precision_plugin.scaler.get_scale()
            print(f"batch {batch_idx:2d} d {loss_d.item():.4f} g {loss_g.item():.4f} scale {scale:.0f}")

    def on_before_optimizer_step(self, optimizer):
        norm = nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
        if torch.isfinite(norm):
            self.log("grad_norm", norm)

    def on_train_epoch_end(self):
        for schedule in self.lr_schedulers():
            schedule.step()

    def configure_optimizers(self):
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=2e-3, betas=(0.5, 0.99))
        decay = torch.optim.lr_scheduler.ExponentialLR
        return [opt_g, opt_d], [decay(opt_g, 0.9), decay(opt_d, 0.9)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    L.seed_everything(17, verbose=False)
    angle = 2 * torch.pi * torch.rand(640)
    radius = torch.where(torch.rand(640) < 0.5, 0.5, 1.0) + 0.02 * torch.randn(640)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**20))],
    ).fit(RingGAN(), DataLoader(TensorDataset(points), batch_size=16, shuffle=True))
