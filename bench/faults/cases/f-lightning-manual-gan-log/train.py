"""A GAN with Lightning's manual optimisation in float16; the losses are written as in the paper."""

import logging
import warnings

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore", ".*does not have many workers.*")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Generator(nn.Module):
    def __init__(self, latent=16, out=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(latent, 64), nn.LeakyReLU(0.2), nn.Linear(64, out))

    def forward(self, z):
        return self.net(z)


class Discriminator(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1), nn.Sigmoid())

    def forward(self, x):
        return self.net(x)


class GAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = Generator()
        self.discriminator = Discriminator()

    def training_step(self, batch, batch_idx):
        opt_d, opt_g = self.optimizers()
        (real,) = batch
        z = torch.randn(len(real), 16)

        fake = self.generator(z).detach()
        p_real = self.discriminator(real)
        p_fake = self.discriminator(fake)
        loss_real = -(0.9 * torch.log(p_real) + 0.1 * torch.log(1 - p_real)).mean()  # one-sided label smoothing
        loss_d = loss_real - torch.log(1 - p_fake).mean()
        opt_d.zero_grad()
        self.manual_backward(loss_d)
        opt_d.step()

        score = self.discriminator(self.generator(z))
        loss_g = -score.clamp(min=1e-3).log().mean()
        opt_g.zero_grad()
        self.manual_backward(loss_g)
        opt_g.step()

        if batch_idx % 20 == 0 or not torch.isfinite(loss_d):
            print(f"batch {batch_idx} d {loss_d.item():.4f} g {loss_g.item():.4f}")

    def configure_optimizers(self):
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=2e-3, betas=(0.5, 0.9))
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=2e-4, betas=(0.5, 0.9))
        return opt_d, opt_g


def main():
    torch.set_num_threads(1)
    L.seed_everything(5, verbose=False)
    x = torch.randn(1600, 32) * 0.3 + torch.linspace(0.2, 1, 32)
    x[torch.rand(1600) < 0.002] *= 4  # a few recordings were not normalised
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))],
    )
    trainer.fit(GAN(), DataLoader(TensorDataset(x), batch_size=16))


if __name__ == "__main__":
    main()
