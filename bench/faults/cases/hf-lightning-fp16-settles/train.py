"""An image classifier with Lightning in real float16. The loss scale starts far too high and has to find its level."""

import logging
import warnings

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Report(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx % 8 == 0:
            scale = trainer.precision_plugin.scaler.get_scale()
            print(
                f"epoch {trainer.current_epoch} batch {batch_idx} loss {outputs['loss'].item():.4f} scale {scale:.0f}"
            )


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 4),
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.nll_loss(F.log_softmax(self(x), dim=-1), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x).float(), y))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def main():
    torch.set_num_threads(1)
    L.seed_everything(3, verbose=False)
    y = torch.randint(0, 4, (384,))
    x = torch.randn(384, 1, 12, 12) + y[:, None, None, None]
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        callbacks=[Report()],
        plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**21))],
    )
    trainer.fit(
        Classifier(),
        DataLoader(TensorDataset(x[:320], y[:320]), batch_size=16),
        DataLoader(TensorDataset(x[320:], y[320:]), batch_size=16),
    )
    print("val_loss", trainer.callback_metrics["val_loss"].item())


if __name__ == "__main__":
    main()
