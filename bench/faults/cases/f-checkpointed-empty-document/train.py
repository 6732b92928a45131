"""Classify documents; gradient checkpointing keeps the long ones in memory."""

import random

import torch
from torch import nn

from encoder import DocumentEncoder


def documents(n, rng):
    stopwords = set(range(1, 20))
    for _ in range(n):
        words = [rng.choice([rng.randrange(1, 20), rng.randrange(20, 90)]) for _ in range(rng.choice([5, 10, 20]))]
        yield [w for w in words if w not in stopwords], sum(words) % 4


def pad(docs):
    width = max(len(doc) for doc in docs)
    return torch.tensor([doc + [0] * (width - len(doc)) for doc in docs])


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = list(documents(360, random.Random(33)))
    model = nn.ModuleDict({"encoder": DocumentEncoder(90), "classifier": nn.Linear(48, 4)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    model.train()
    for step, start in enumerate(range(0, len(data), 12)):
        docs, labels = zip(*data[start : start + 12])
        features = model["encoder"](pad(docs))
        loss = criterion(model["classifier"](features), torch.tensor(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")
        if torch.isnan(loss):
            raise SystemExit("loss is NaN, stopping training")


if __name__ == "__main__":
    main()
