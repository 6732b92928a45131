import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def relative_position_bucket(relative_position, num_buckets=16, max_distance=32):
    num_buckets //= 2
    buckets = (relative_position > 0).long() * num_buckets
    distance = relative_position.abs()
    max_exact = num_buckets // 2
    is_small = distance < max_exact
    large = (
        max_exact
        + (
            torch.log(distance.float() / max_exact) / math.log(max_distance / max_exact) * (num_buckets - max_exact)
        ).long()
    )
    large = torch.min(large, torch.full_like(large, num_buckets - 1))
    return buckets + torch.where(is_small, distance, large)


class RelativeAttention(nn.Module):
    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.bias = nn.Embedding(16, heads)

    def forward(self, x, pad):
        b, t, _ = x.shape
        q, k, v = (m(x).view(b, t, self.heads, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        pos = torch.arange(t)
        position_bias = self.bias(relative_position_bucket(pos[None] - pos[:, None])).permute(2, 0, 1)
        scores = q @ k.transpose(2, 3) + position_bias
        scores = scores + pad[:, None, None, :] * torch.finfo(scores.dtype).min
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1))


class Encoder(nn.Module):
    def __init__(self, vocab=40, dim=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=0)
        self.attn = nn.ModuleList([RelativeAttention(dim) for _ in range(2)])
        self.ff = nn.ModuleList([nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, dim)) for _ in range(2)])
        self.norm = nn.ModuleList([nn.LayerNorm(dim) for _ in range(2)])
        self.lm = nn.Linear(dim, vocab)

    def forward(self, ids):
        pad = ids.eq(0).float()
        x = self.emb(ids)
        for attn, ff, norm in zip(self.attn, self.ff, self.norm):
            x = norm(x)
            x = x + attn(x, pad)
            x = x + ff(x)
        return self.lm(x)


def evaluate(model, g):
    model.eval()
    with torch.no_grad():
        ids, target = sample(g)
        loss = F.cross_entropy(model(ids).transpose(1, 2), target, ignore_index=-100)
    model.train()
    return math.exp(loss.item())


def sample(g, batch=8, length=12):
    start = torch.randint(1, 20, (batch, 1), generator=g)
    ids = start + torch.arange(length)
    ids[torch.arange(length)[None] >= torch.randint(6, length + 1, (batch, 1), generator=g)] = 0
    hole = torch.rand(ids.shape, generator=g) < 0.2
    hole[:, 1] = True
    target = ids.masked_fill(~hole | ids.eq(0), -100)
    return ids.masked_fill(hole & ids.ne(0), 39), target


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(0)
    model = Encoder()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(40):
        ids, target = sample(g)
        loss = F.cross_entropy(model(ids).transpose(1, 2), target, ignore_index=-100)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 9:
            print(f"step {step + 1} loss {loss.item():.4f} ppl {evaluate(model, g):.2f}")


main()
