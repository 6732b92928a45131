import torch
import torch.nn as nn


class FrameLayer(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.kernel = nn.Linear(cin, cout)
        self.norm = nn.LayerNorm(cout)

    def forward(self, x):
        return torch.relu(self.norm(self.kernel(x)))


class StatsPooling(nn.Module):
    """Mean and standard deviation over time, weighted by attention."""

    def __init__(self, dim):
        super().__init__()
        self.attention = nn.Sequential(nn.Linear(dim, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        w = torch.softmax(self.attention(x), dim=1)
        mean = (w * x).sum(1)
        second = (w * x.square()).sum(1)
        std = torch.sqrt(second - mean.square() + 1e-10)
        return torch.cat([mean, std], dim=-1)


class XVector(nn.Module):
    def __init__(self, n_feats=20, dim=48, speakers=8):
        super().__init__()
        self.frames = nn.ModuleList([FrameLayer(n_feats, dim), FrameLayer(dim, dim)])
        self.pool = StatsPooling(dim)
        self.embed = nn.Linear(2 * dim, 32)
        self.out = nn.Linear(32, speakers)

    def forward(self, feats):
        x = feats
        for layer in self.frames:
            x = layer(x)
        emb = self.embed(self.pool(x))
        return self.out(torch.tanh(emb)), emb
