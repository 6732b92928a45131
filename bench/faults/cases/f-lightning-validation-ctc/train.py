"""A line recogniser with CTC in Lightning. Validation uses the raw, unfiltered transcripts."""

import logging
import warnings

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

FRAMES = 12


class Lines(Dataset):
    def __init__(self, n, seed, longest):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            length = int(torch.randint(2, longest + 1, (), generator=g))
            text = torch.randint(1, 12, (length,), generator=g)
            image = torch.randn(FRAMES, 16, generator=g) * 0.3
            image[: min(length, FRAMES), 0] += text[:FRAMES].float() / 4
            self.items.append((image, text))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(rows):
    images = torch.stack([image for image, _ in rows])
    texts = torch.cat([text for _, text in rows])
    return images, texts, torch.tensor([len(text) for _, text in rows])


class Recogniser(L.LightningModule):
    def __init__(self, classes=12, hidden=32):
        super().__init__()
        self.rnn = nn.GRU(16, hidden, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden, classes)
        self.criterion = nn.CTCLoss(blank=0)

    def forward(self, images):
        states, _ = self.rnn(images)
        return self.head(states).log_softmax(-1).transpose(0, 1)

    def loss(self, batch):
        images, texts, lengths = batch
        log_probs = self(images)
        frames = torch.full((len(images),), log_probs.shape[0], dtype=torch.long)
        return self.criterion(log_probs, texts, frames, lengths)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), batch_size=len(batch[2]))

    def on_validation_epoch_end(self):
        print(f"epoch {self.current_epoch} val_loss {self.trainer.callback_metrics['val_loss'].item():.4f}")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main():
    torch.set_num_threads(1)
    L.seed_everything(1, verbose=False)
    train = DataLoader(Lines(96, 2, longest=6), batch_size=8, shuffle=True, collate_fn=collate)
    held_out = DataLoader(Lines(40, 3, longest=13), batch_size=8, collate_fn=collate)
    trainer = L.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=1,
    )
    trainer.fit(Recogniser(), train, held_out)


if __name__ == "__main__":
    main()
