import math

import torch
from torch import nn

torch.set_num_threads(1)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        b, n, _ = x.shape
        q, k, v = (t.reshape(b, n, self.heads, -1) for t in self.to_qkv(x).chunk(3, dim=-1))
        dots = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
        if mask is not None:
            bias = (1.0 - mask) * float("-inf")
            dots = dots + bias[:, None, None, :]
        attn = dots.softmax(dim=-1)
        out = torch.einsum("bhij,bjhd->bihd", attn, v)
        return self.to_out(out.reshape(b, n, -1))


class Transformer(nn.Module):
    def __init__(self, vocab=50, dim=32, depth=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            self.layers.append(
                nn.ModuleList(
                    [
                        nn.LayerNorm(dim),
                        Attention(dim, 4),
                        nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim * 2), nn.SiLU(), nn.Linear(dim * 2, dim)),
                    ]
                )
            )
        self.to_logits = nn.Linear(dim, vocab)

    def forward(self, ids, mask=None):
        x = self.emb(ids)
        for norm, attn, ff in self.layers:
            x = attn(norm(x), mask) + x
            x = ff(x) + x
        return self.to_logits(x)


def bucketed(n):
    """Sentences are sorted by length, so most batches need no padding."""
    g = torch.Generator().manual_seed(9)
    for i in range(n):
        length = 6 + i // 3
        ids = torch.randint(1, 50, (6, length), generator=g)
        if i == 14:
            mask = torch.ones(6, length)
            mask[4, -2:] = 0
            yield ids * mask.long(), mask
        else:
            yield ids, None


torch.manual_seed(0)
model = Transformer()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for i, (ids, mask) in enumerate(bucketed(18)):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids, mask=mask)
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), ids, ignore_index=0)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(i, tuple(ids.shape), f"{loss.item():.4f}")
