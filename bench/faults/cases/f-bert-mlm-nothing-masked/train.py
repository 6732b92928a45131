"""Masked language modelling on single sentences with tiny batches, as for very large models."""

import random

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForMaskedLM

PAD, CLS, SEP, MASK = 0, 1, 2, 3
VOCAB = 200


class Sentences(Dataset):
    def __init__(self, n=160, seed=5):
        rng = random.Random(seed)
        self.rows = [[rng.randrange(4, VOCAB) for _ in range(rng.randint(3, 14))] for _ in range(n)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return [CLS, *self.rows[i], SEP]


class MaskingCollator:
    def __init__(self, probability=0.15, seed=1):
        self.probability = probability
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, rows):
        width = max(map(len, rows))
        ids = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
        special = ids < 4
        chosen = torch.bernoulli(torch.full(ids.shape, self.probability), generator=self.generator).bool() & ~special
        labels = torch.where(chosen, ids, -100)
        return {
            "input_ids": torch.where(chosen, MASK, ids),
            "attention_mask": (ids != PAD).long(),
            "labels": labels,
        }


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=32,
    )
    model = BertForMaskedLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    loader = DataLoader(Sentences(), batch_size=2, collate_fn=MaskingCollator())
    model.train()
    running = None
    for i, batch in enumerate(loader):
        out = model(**batch)
        optimizer.zero_grad(set_to_none=True)
        out.loss.backward()
        optimizer.step()
        running = out.loss.item() if running is None else 0.9 * running + 0.1 * out.loss.item()
        if i % 10 == 0:
            print(f"[{i:3d}] loss {out.loss.item():.4f} avg {running:.4f}")
    print("final average", running)


if __name__ == "__main__":
    main()
