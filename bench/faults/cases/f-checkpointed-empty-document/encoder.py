import math

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, keep):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(d // self.heads)
        scores = scores.masked_fill(~keep[:, None, None, :], float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, t, d))


class Layer(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * dim, dim))

    def forward(self, x, keep):
        x = x + self.attn(self.norm1(x), keep)
        return x + self.mlp(self.norm2(x))


class DocumentEncoder(nn.Module):
    def __init__(self, vocab, dim=48, heads=4, depth=3, dropout=0.1, gradient_checkpointing=True):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=0)
        self.layers = nn.ModuleList(Layer(dim, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.gradient_checkpointing = gradient_checkpointing

    def forward(self, ids):
        keep = ids != 0
        x = self.embed(ids)
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                x = checkpoint(layer, x, keep, use_reentrant=False)
            else:
                x = layer(x, keep)
        x = self.norm(x) * keep[..., None]
        return x.sum(1) / keep.sum(1, keepdim=True).clamp(min=1)
