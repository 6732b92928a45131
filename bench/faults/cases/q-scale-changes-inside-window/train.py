"""Few classes per batch: the head learns at every batch, the shared encoder accumulates over several."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self, vocab=60, dim=32):
        super().__init__()
        self.tokens = nn.EmbeddingBag(vocab, dim, mode="mean")
        self.net = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, dim))

    def forward(self, ids):
        return self.net(self.tokens(ids))


class Experiment:
    accumulate = 4

    def __init__(self, classes=10):
        self.encoder = Encoder()
        self.head = nn.Linear(32, classes)
        self.encoder_opt = torch.optim.SGD(self.encoder.parameters(), lr=0.05, momentum=0.9)
        self.head_opt = torch.optim.SGD(self.head.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10)
        self.g = torch.Generator().manual_seed(2)
        self.topics = torch.rand(classes, 60, generator=self.g) ** 6

    def batch(self, size=12):
        labels = torch.randint(0, len(self.topics), (size,), generator=self.g)
        return torch.multinomial(self.topics[labels], 16, True, generator=self.g), labels

    def step(self, index):
        ids, labels = self.batch()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = self.head(self.encoder(ids))
            loss = F.cross_entropy(logits, labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.head_opt)
        self.head_opt.zero_grad()
        if (index + 1) % self.accumulate == 0:
            self.scaler.unscale_(self.encoder_opt)
            norm = nn.utils.clip_grad_norm_(self.encoder.parameters(), 8.0)
            self.scaler.step(self.encoder_opt)
            self.encoder_opt.zero_grad()
            print(
                f"batch {index:3d} loss {loss.item():.4f} encoder norm {norm:.4f} scale {self.scaler.get_scale():.0f}"
            )
        self.scaler.update()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(2)
    experiment = Experiment()
    for index in range(48):
        experiment.step(index)
