"""Fine-tune a half precision text encoder under a float32 head: the head first, then everything."""

import torch
from torch import nn


class HalfEncoder(nn.Module):
    def __init__(self, vocab=200, dim=48):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(dim, dim), nn.Tanh()) for _ in range(3)])

    def forward(self, ids):
        h = self.wte(ids)
        for block in self.blocks:
            h = h + block(h)
        return h.mean(1)


class Classifier(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.encoder = HalfEncoder().half()
        self.head = nn.Linear(48, classes)

    def freeze_encoder(self, frozen):
        for p in self.encoder.parameters():
            p.requires_grad_(not frozen)

    def forward(self, ids):
        return self.head(self.encoder(ids).float())


def texts(n, g):
    y = torch.randint(0, 4, (n,), generator=g)
    ids = torch.randint(0, 200, (n, 14), generator=g)
    ids[:, :4] = 50 * y[:, None] + torch.randint(0, 50, (n, 4), generator=g)
    return ids, y


def main():
    torch.set_num_threads(1)
    torch.manual_seed(3)
    g = torch.Generator().manual_seed(2)
    model = Classifier()
    model.freeze_encoder(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    for step in range(40):
        if step == 15:
            model.freeze_encoder(False)
            print("encoder unfrozen")
        ids, y = texts(24, g)
        loss = criterion(model(ids), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 3 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
