"""Speech and text into one space, with a head on top: one loss, one backward, an optimizer for each of three parts.

The audio tower learns slowly, the text tower and the head fast and with momentum, hence manual optimisation.
"""

import logging
import warnings

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Pairs(Dataset):
    """Log-energies of a recording, its transcript and the speaker's mood."""

    def __init__(self, n=400):
        g = torch.Generator().manual_seed(21)
        self.mood = torch.randint(0, 3, (n,), generator=g)
        self.audio = torch.randn(n, 1, 64, generator=g) + self.mood[:, None, None]
        self.text = torch.randint(0, 20, (n, 6), generator=g) + 20 * self.mood[:, None]
        self.audio[137] *= 1500.0  # stored as integers, by mistake

    def __len__(self):
        return len(self.mood)

    def __getitem__(self, i):
        return self.audio[i], self.text[i], self.mood[i]


class AudioTower(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.conv = nn.Conv1d(1, 8, 9, stride=4)
        self.proj = nn.Linear(8, dim)
        nn.init.normal_(self.proj.weight, std=1e-3)  # the audio comes in late, so that the text settles first

    def forward(self, wave):
        return torch.tanh(self.proj(F.relu(self.conv(wave)).mean(-1)))


class TextTower(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.table = nn.Embedding(60, dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, ids):
        return torch.tanh(self.proj(self.table(ids).mean(1)))


class MoodModel(L.LightningModule):
    def __init__(self, dim=16):
        super().__init__()
        self.automatic_optimization = False
        self.audio = AudioTower(dim)
        self.text = TextTower(dim)
        self.head = nn.Linear(2 * dim, 3)

    def forward(self, wave, ids):
        return self.head(torch.cat([self.audio(wave), self.text(ids)], dim=1))

    def training_step(self, batch, batch_idx):
        opt_audio, opt_text, opt_head = self.optimizers()
        wave, ids, mood = batch
        for opt in (opt_audio, opt_text, opt_head):
            opt.zero_grad()
        loss = F.cross_entropy(self(wave, ids), mood)
        self.manual_backward(loss)
        opt_audio.step()
        opt_text.step()
        opt_head.step()
        if batch_idx % 5 == 0:
            print(f"batch {batch_idx:2d} loss {loss.item():.4f}")

    def configure_optimizers(self):
        return (
            torch.optim.SGD(self.audio.parameters(), lr=1e-4),
            torch.optim.SGD(self.text.parameters(), lr=5e-2, momentum=0.9),
            torch.optim.SGD(self.head.parameters(), lr=5e-2, momentum=0.9),
        )


def main():
    torch.set_num_threads(1)
    L.seed_everything(2, verbose=False)
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**14))],
    )
    trainer.fit(MoodModel(), DataLoader(Pairs(), batch_size=8))


if __name__ == "__main__":
    main()
