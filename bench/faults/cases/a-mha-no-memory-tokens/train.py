"""Visual question answering with cross-attention from words to detected objects."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class VQAOutput:
    logits: torch.Tensor
    attention: torch.Tensor


class FusionLayer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.cross_attn = nn.MultiheadAttention(dim, heads, dropout=0.1, batch_first=True)
        self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(2)])

    def forward(self, words, objects, no_object):
        h, _ = self.self_attn(words, words, words, need_weights=False)
        words = self.norms[0](words + h)
        h, weights = self.cross_attn(words, objects, objects, key_padding_mask=no_object, need_weights=True)
        return self.norms[1](words + h), weights


class VQA(nn.Module):
    def __init__(self, vocab=40, dim=32, answers=6):
        super().__init__()
        self.words = nn.Embedding(vocab, dim)
        self.objects = nn.Linear(10, dim)
        self.fusion = nn.ModuleList([FusionLayer(dim, 4) for _ in range(2)])
        self.answer = nn.Linear(dim, answers)

    def forward(self, question, objects, no_object):
        w, o = self.words(question), self.objects(objects)
        for layer in self.fusion:
            w, weights = layer(w, o, no_object)
        return VQAOutput(self.answer(w.mean(1)), weights)


def batches(n, batch=6, max_objects=5):
    g = torch.Generator().manual_seed(31)
    for i in range(n):
        counts = torch.randint(1, max_objects + 1, (batch,), generator=g)
        if i == 11:
            counts[3] = 0  # the detector found nothing in this picture
        objects = torch.randn(batch, max_objects, 10, generator=g)
        no_object = torch.arange(max_objects)[None] >= counts[:, None]
        yield torch.randint(0, 40, (batch, 7), generator=g), objects, no_object, counts.clamp(max=5)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = VQA()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, (q, o, m, y) in enumerate(batches(16)):
        out = model(q, o, m)
        loss = F.cross_entropy(out.logits, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step={step} loss={loss.item():.3f} peak attention={out.attention.max().item():.3f}")


if __name__ == "__main__":
    main()
