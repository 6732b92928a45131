"""Adversarial autoencoder on tabular rows: three networks, three Adams, three ReduceLROnPlateau, Lightning in float16."""

import logging
import warnings

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def mlp(*sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.ELU()]
    return nn.Sequential(*layers[:-1])


class AdversarialAutoencoder(L.LightningModule):
    def __init__(self, width=20, code=4):
        super().__init__()
        self.automatic_optimization = False
        self.encoder = mlp(width, 32, code)
        self.decoder = mlp(code, 32, width)
        self.critic = mlp(code, 16, 1)

    def configure_optimizers(self):
        optimizers = [torch.optim.Adam(net.parameters(), 1e-3) for net in (self.encoder, self.decoder, self.critic)]
        schedules = [torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=2) for o in optimizers]
        return optimizers, schedules

    def training_step(self, batch, batch_idx):
        enc, dec, crit = self.optimizers()
        (x,) = batch

        z = self.encoder(x)
        reconstruction = nn.functional.mse_loss(self.decoder(z), x)
        enc.zero_grad()
        dec.zero_grad()
        reconstruction.backward()
        enc.step()
        dec.step()

        prior = torch.randn(len(x), z.shape[1])
        logits = torch.cat([self.critic(prior), self.critic(self.encoder(x).detach())])
        truth = torch.cat([torch.ones(len(x), 1), torch.zeros(len(x), 1)])
        critic_loss = nn.functional.binary_cross_entropy_with_logits(logits, truth)
        crit.zero_grad()
        critic_loss.backward()
        crit.step()

        self.log("reconstruction", reconstruction.detach())
        if batch_idx % 10 == 0:
            print(f"batch {batch_idx} reconstruction {reconstruction.item():.4f} critic {critic_loss.item():.4f}")

    def on_train_epoch_end(self):
        for schedule in self.lr_schedulers():
            schedule.step(self.trainer.callback_metrics["reconstruction"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    L.seed_everything(11, verbose=False)
    rows = torch.randn(320, 4) @ torch.randn(4, 20)
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))],
    )
    trainer.fit(AdversarialAutoencoder(), DataLoader(TensorDataset(rows), batch_size=16, shuffle=True))
