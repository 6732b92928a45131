import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        causal = torch.ones(n, n, dtype=torch.bool).tril()
        att = (q @ k.transpose(-2, -1) / (d // self.heads) ** 0.5).masked_fill(~causal, float("-inf"))
        return self.out((att.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.attn = Attention(d, heads)
        self.ff = nn.Sequential(nn.Linear(d, 4 * d), nn.ReLU(), nn.Linear(4 * d, d))

    def forward(self, x):
        x = x + self.attn(x)
        return x + self.ff(x)


class LanguageModel(nn.Module):
    """No norms: fewer kernels, and it worked in the two-layer version."""

    def __init__(self, vocab=32, d=32, layers=8, heads=4, length=24):
        super().__init__()
        self.width = d
        self.tok = nn.Embedding(vocab, d)
        self.pos = nn.Parameter(0.02 * torch.randn(length, d))
        self.blocks = nn.ModuleList([Block(d, heads) for _ in range(layers)])
        self.lm = nn.Linear(d, vocab)

    def forward(self, ids):
        x = self.tok(ids) + self.pos[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.lm(x)
