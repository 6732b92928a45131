"""The same; the largest |x| is kept away from 0."""

import torch
from torch import nn

torch.manual_seed(0)
FORMAT = torch.float8_e4m3fn


class Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        return (x * scale).to(FORMAT).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Float8Linear(nn.Linear):
    def forward(self, x):
        scale = torch.finfo(FORMAT).max / x.detach().abs().amax().clamp(min=1e-12)
        return super().forward(Quantize.apply(x, scale))


model = nn.Sequential(Float8Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(4):
    x = torch.zeros(4, 8) if step == 2 else torch.randn(4, 8)
    loss = (model(x) - 1.0).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
