import math

import torch
import torch.nn as nn


class SelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.h, self.d = heads, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, pad):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.h, self.d).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d)
        scores = scores.masked_fill(pad[:, None, None, :], float("-inf"))
        weights = scores.softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, t, c))


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = SelfAttention(dim, heads)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, pad):
        x = x + self.attn(self.n1(x), pad)
        return x + self.ff(self.n2(x))


class Encoder(nn.Module):
    def __init__(self, vocab, dim=32, depth=2, heads=4):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim, padding_idx=0)
        self.pos = nn.Parameter(torch.randn(1, 16, dim) * 0.02)
        self.layers = nn.ModuleList([Layer(dim, heads) for _ in range(depth)])

    def forward(self, ids):
        pad = ids.eq(0)
        x = self.tok(ids) + self.pos[:, : ids.shape[1]]
        for layer in self.layers:
            x = layer(x, pad)
        return x, pad


class Sentiment(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.encoder = Encoder(vocab)
        self.cls = nn.Linear(32, 2)

    def forward(self, ids):
        x, pad = self.encoder(ids)
        x = x[:, 0]
        return {"logits": self.cls(x), "pooled": x}
