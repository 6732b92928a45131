"""SimCLR on small tiles with Lightning, mixed precision float16."""

import logging
import warnings

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

warnings.filterwarnings("ignore", ".*does not have many workers.*")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Tiles(Dataset):
    """Tiles of a slide; a few of them hold no tissue at all and were blanked by the segmentation."""

    def __init__(self, n=384):
        g = torch.Generator().manual_seed(8)
        self.x = torch.rand(n, 1, 16, 16, generator=g)
        self.x[torch.rand(n, generator=g) < 0.006] = 0.0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        tile = self.x[i]
        return tile.flip(-1), tile.flip(-2)


def normalise(z):
    return z / (z.norm(dim=-1, keepdim=True) + 1e-8)


def nt_xent(a, b, temperature=0.2):
    z = normalise(torch.cat([a, b]))
    similarity = z @ z.t() / temperature
    similarity.fill_diagonal_(-1e4)
    partner = torch.arange(len(z)).roll(len(a))
    return F.cross_entropy(similarity.float(), partner)


class SimCLR(L.LightningModule):
    def __init__(self, dim=32):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.projector = nn.Sequential(nn.Linear(16, dim, bias=False), nn.ReLU(), nn.Linear(dim, dim, bias=False))

    def forward(self, x):
        return self.projector(self.backbone(x))

    def training_step(self, batch, batch_idx):
        left, right = batch
        loss = nt_xent(self(left), self(right))
        if batch_idx % 4 == 0 or not torch.isfinite(loss):
            print(f"epoch {self.current_epoch} batch {batch_idx} loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main():
    torch.set_num_threads(1)
    L.seed_everything(12, verbose=False)
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))],
    )
    trainer.fit(SimCLR(), DataLoader(Tiles(), batch_size=16))


if __name__ == "__main__":
    main()
