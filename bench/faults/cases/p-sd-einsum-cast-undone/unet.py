import torch
from torch import nn

from attention import SpatialTransformer


class TinyUNet(nn.Module):
    def __init__(self, ch=32, context_dim=24):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, ch), nn.SiLU(), nn.Linear(ch, ch))
        self.conv_in = nn.Conv2d(4, ch, 3, padding=1)
        self.down = nn.ModuleList([SpatialTransformer(ch, context_dim)])
        for layer in self.down:
            layer.attn1.init_qk(std=9.0)
        self.mid = SpatialTransformer(ch, context_dim)
        self.conv_out = nn.Conv2d(ch, 4, 3, padding=1)

    def forward(self, x, t, context):
        h = self.conv_in(x) + self.time(t[:, None])[:, :, None, None]
        for layer in self.down:
            h = layer(h, context)
        h = self.mid(h, context)
        return self.conv_out(h)
