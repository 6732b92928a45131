import torch
import torch.nn.functional as F

from model import Sentiment
from text import VOCAB, collate, corpus


def chunks(rows, size):
    return [collate(rows[i : i + size]) for i in range(0, len(rows), size)]


class Loop:
    def __init__(self):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = Sentiment(len(VOCAB) + 1)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2048.0)
        self.train_rows = list(corpus(192, 0))
        dev = list(corpus(60, 1))
        dev.insert(37, ("It was it is", 0))
        self.dev_rows = dev

    def forward(self, ids, y):
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.model(ids)
        return out["logits"], F.cross_entropy(out["logits"].float(), y)

    def train_epoch(self):
        self.model.train()
        for ids, y in chunks(self.train_rows, 16):
            _, loss = self.forward(ids, y)
            self.opt.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.opt)
            self.scaler.update()
        return loss.item()

    @torch.no_grad()
    def dev_loss(self):
        self.model.eval()
        total = 0.0
        for ids, y in chunks(self.dev_rows, 20):
            total += self.forward(ids, y)[1].item() * len(y)
        return total / len(self.dev_rows)

    def run(self):
        for epoch in range(2):
            print(f"epoch {epoch} last train loss {self.train_epoch():.4f}")
        print(f"dev loss {self.dev_loss():.4f}")


if __name__ == "__main__":
    Loop().run()
