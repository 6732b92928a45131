"""A frozen text encoder with a head per task; every batch belongs to one task and trains that head only."""

import itertools
from collections import defaultdict

import torch
import torch.nn as nn
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self, vocab=80, dim=32):
        super().__init__()
        self.embeddings = nn.Embedding(vocab, dim)
        self.layer = nn.ModuleList(nn.TransformerEncoderLayer(dim, 4, 64, 0.1, batch_first=True) for _ in range(2))

    def forward(self, ids):
        x = self.embeddings(ids)
        for layer in self.layer:
            x = layer(x)
        return x


class TaggingHead(nn.Module):
    def __init__(self, dim, tags):
        super().__init__()
        self.classifier = nn.Linear(dim, tags)

    def forward(self, states, labels):
        return F.cross_entropy(self.classifier(states).flatten(0, 1), labels.flatten())


class SentenceHead(nn.Module):
    def __init__(self, dim, classes):
        super().__init__()
        self.pool = nn.Sequential(nn.Linear(dim, dim), nn.Tanh())
        self.out = nn.Linear(dim, classes)

    def forward(self, states, labels):
        return F.cross_entropy(self.out(self.pool(states.mean(1))), labels)


class SimilarityHead(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.project = nn.Linear(dim, dim)

    def forward(self, states, labels):
        a, b = self.project(states.mean(1)).float().chunk(2)
        return F.mse_loss(F.cosine_similarity(a, b), labels)


class MultiTaskModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Encoder().requires_grad_(False).eval()
        self.heads = nn.ModuleDict(
            {"tag": TaggingHead(32, 4), "topic": SentenceHead(32, 5), "similarity": SimilarityHead(32)}
        )

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, task, ids, labels):
        with torch.no_grad():
            states = self.backbone(ids)
        return self.heads[task](states, labels)


def task_batches(task, generator):
    while True:
        ids = torch.randint(0, 80, (8, 12), generator=generator)
        if task == "tag":
            yield ids, ids % 4
        elif task == "topic":
            topic = torch.randint(0, 5, (8,), generator=generator)
            yield (ids % 16 + 16 * topic[:, None]), topic
        else:
            ids[4:, ::2] = ids[:4, ::2]
            yield ids, (ids[:4] == ids[4:]).float().mean(1)


def main(rounds=16):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = MultiTaskModel().train()
    shared = torch.optim.AdamW(
        [{"params": model.heads["tag"].parameters()}, {"params": model.heads["topic"].parameters(), "lr": 5e-3}],
        lr=1e-2,
    )
    optimizers = {"tag": shared, "topic": shared}
    optimizers["similarity"] = torch.optim.SGD(model.heads["similarity"].parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    streams = {task: task_batches(task, torch.Generator().manual_seed(i)) for i, task in enumerate(model.heads)}
    history = defaultdict(list)
    order = itertools.chain.from_iterable(["tag", "topic", "similarity", "topic"] for _ in range(rounds))
    for step, task in enumerate(order):
        optimizer = optimizers[task]
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(task, *next(streams[task]))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.heads[task].parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        history[task].append(loss.item())
        if step % 16 == 15:
            print(step, {name: round(losses[-1], 4) for name, losses in history.items()})


if __name__ == "__main__":
    main()
