import random

import torch

STOP = {"the", "a", "it", "is", "was", "and"}
POS, NEG, REST = (
    ["good", "great", "lovely", "sharp"],
    ["bad", "awful", "dull", "weak"],
    ["film", "plot", "actor", "scene", "music", *sorted(STOP)],
)
VOCAB = {w: i + 1 for i, w in enumerate(POS + NEG + [w for w in REST if w not in STOP])}


def tokenize(text):
    return [VOCAB[w] for w in text.lower().split() if w not in STOP and w in VOCAB]


def corpus(n, seed):
    r = random.Random(seed)
    for _ in range(n):
        label = r.randint(0, 1)
        yield " ".join(r.choices(REST, k=5) + r.choices(POS if label else NEG, k=2)), label


def collate(rows):
    ids = [tokenize(t) for t, _ in rows]
    width = max(map(len, ids))
    return torch.tensor([i + [0] * (width - len(i)) for i in ids]), torch.tensor([label for _, label in rows])
