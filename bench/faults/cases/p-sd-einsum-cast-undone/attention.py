import torch
from torch import einsum, nn


class CrossAttention(nn.Module):
    def __init__(self, query_dim, context_dim=None, heads=2, dim_head=16):
        super().__init__()
        inner_dim = dim_head * heads
        context_dim = context_dim or query_dim
        self.scale = dim_head**-0.5
        self.heads = heads
        self.to_q = nn.Linear(query_dim, inner_dim, bias=False)
        self.to_k = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_v = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_out = nn.Linear(inner_dim, query_dim)

    def init_qk(self, std):
        nn.init.normal_(self.to_q.weight, std=std)
        nn.init.normal_(self.to_k.weight, std=std)

    def split(self, t):
        b, n, d = t.shape
        return t.reshape(b, n, self.heads, d // self.heads).transpose(1, 2).reshape(b * self.heads, n, -1)

    def forward(self, x, context=None):
        context = x if context is None else context
        b, n, _ = x.shape
        q, k, v = (self.split(t) for t in (self.to_q(x), self.to_k(context), self.to_v(context)))
        # scores in full precision, they overflowed in half
        q, k = q.float(), k.float()
        sim = einsum("b i d, b j d -> b i j", q, k) * self.scale
        attn = sim.softmax(dim=-1)
        out = einsum("b i j, b j d -> b i d", attn, v)
        out = out.reshape(b, self.heads, n, -1).transpose(1, 2).reshape(b, n, -1)
        return self.to_out(out)


class SpatialTransformer(nn.Module):
    def __init__(self, ch, context_dim):
        super().__init__()
        self.attn1 = CrossAttention(ch)
        self.attn2 = CrossAttention(ch, context_dim)
        self.norm = nn.GroupNorm(4, ch)

    def forward(self, x, context):
        b, c, h, w = x.shape
        t = self.norm(x).flatten(2).transpose(1, 2)
        t = t + self.attn1(t)
        t = t + self.attn2(t, context)
        return x + t.transpose(1, 2).reshape(b, c, h, w)
