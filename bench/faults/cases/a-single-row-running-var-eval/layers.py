import torch
import torch.nn as nn


class RunningNorm(nn.Module):
    """Batch normalisation over rows, written out so that it can be exported."""

    def __init__(self, dim, momentum=0.1, eps=1e-5):
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.gain = nn.Parameter(torch.ones(dim))
        self.shift = nn.Parameter(torch.zeros(dim))
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("var", torch.ones(dim))

    def forward(self, x):
        if self.training:
            mu = x.mean(0)
            centred = x - mu
            biased = centred.pow(2).mean(0)
            with torch.no_grad():
                unbiased = x.var(dim=0)
                self.mean.lerp_(mu, self.momentum)
                self.var.lerp_(unbiased, self.momentum)
            scale = torch.rsqrt(biased + self.eps)
        else:
            centred = x - self.mean
            scale = torch.rsqrt(self.var + self.eps)
        return centred * scale * self.gain + self.shift


class Block(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.lin = nn.Linear(cin, cout)
        self.norm = RunningNorm(cout)

    def forward(self, x):
        return torch.relu(self.norm(self.lin(x)))
