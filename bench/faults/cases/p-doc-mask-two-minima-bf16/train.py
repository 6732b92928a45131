"""Sentence embeddings from packed documents, bfloat16 autocast, no scaler."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def causal_document_mask(doc_ids, dtype):
    """A token sees earlier tokens of its own document. Padding has document id 0."""
    same = (doc_ids[:, :, None] == doc_ids[:, None, :]) & (doc_ids[:, :, None] > 0)
    allowed = same & torch.ones(doc_ids.shape[1], doc_ids.shape[1], dtype=torch.bool).tril()
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)


def padding_mask(doc_ids, dtype):
    pad = doc_ids.eq(0)
    return torch.zeros(pad.shape, dtype=dtype).masked_fill(pad, torch.finfo(dtype).min)[:, None, :]


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)

    def forward(self, x, bias):
        q, k, v = self.qkv(x).chunk(3, -1)
        w = torch.baddbmm(bias, q, k.mT, alpha=q.shape[-1] ** -0.5)
        return self.o(torch.bmm(w.softmax(-1), v))


class Embedder(nn.Module):
    def __init__(self, vocab=60, dim=32, depth=2):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            self.blocks.append(nn.ModuleDict({"ln": nn.LayerNorm(dim), "attn": Attention(dim)}))
        self.out = nn.Linear(dim, dim)

    def build_bias(self, doc_ids):
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else self.wte.weight.dtype
        return causal_document_mask(doc_ids, dtype) + padding_mask(doc_ids, dtype)

    def forward(self, tokens, doc_ids):
        bias = self.build_bias(doc_ids)
        x = self.wte(tokens)
        for b in self.blocks:
            x = x + b["attn"](b["ln"](x), bias)
        keep = doc_ids.gt(0).unsqueeze(-1)
        return self.out((x * keep).sum(1) / keep.sum(1).clamp(min=1))


def pack(lengths, width=12):
    doc_ids = torch.zeros(width, dtype=torch.long)
    pos = 0
    for i, n in enumerate(lengths):
        doc_ids[pos : pos + n] = i + 1
        pos += n
    return doc_ids


torch.set_num_threads(1)
torch.manual_seed(0)
g = torch.Generator().manual_seed(0)
rows = []
for _ in range(93):
    n = int(torch.randint(2, 6, (1,), generator=g))
    rows.append(pack([n, 12 - n - int(torch.randint(0, 3, (1,), generator=g))]))
while len(rows) % 8:
    rows.append(pack([]))  # fill the last batch up to the static batch size
doc_ids = torch.stack(rows)
tokens = torch.randint(0, 60, doc_ids.shape, generator=g)
target = torch.randn(len(rows), 32, generator=g)

model = Embedder()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
for i in range(0, len(rows), 8):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pred = model(tokens[i : i + 8], doc_ids[i : i + 8])
    loss = F.mse_loss(pred.float(), target[i : i + 8])
    print(f"batch {i // 8:2d} loss {loss.item():.4f}")
    if not loss.isfinite():
        break
    loss.backward()
    opt.step()
    opt.zero_grad()
