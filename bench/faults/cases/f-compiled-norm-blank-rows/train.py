"""Denoise sensor frames with a compiled residual network, float16 autocast."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
torch.manual_seed(3)


class VarianceNorm(nn.Module):
    def __init__(self, dim, eps=1e-9):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        var = x.var(dim=-1, keepdim=True)
        inv = torch.rsqrt(var + self.eps)
        return x * inv * self.gain


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = VarianceNorm(dim)
        self.up = nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Denoiser(nn.Module):
    def __init__(self, width=40, dim=32, depth=3):
        super().__init__()
        self.inp = nn.Linear(width, dim, bias=False)
        self.blocks = nn.Sequential(*[Block(dim) for _ in range(depth)])
        self.out = nn.Linear(dim, width)

    def forward(self, frame):
        return self.out(self.blocks(self.inp(frame)))


def frames(steps, batch=16, width=40):
    g = torch.Generator().manual_seed(30)
    for _ in range(steps):
        clean = torch.cumsum(torch.randn(batch, width, generator=g) * 0.2, dim=1)
        off = torch.rand(batch, 1, generator=g) < 0.0015  # the sensor was switched off: a row of zeros
        noisy = torch.where(off, 0.0, clean + 0.1 * torch.randn(batch, width, generator=g))
        yield noisy, clean


net = Denoiser()
compiled = torch.compile(net, backend="aot_eager")
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
for it, (noisy, clean) in enumerate(frames(36)):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.smooth_l1_loss(compiled(noisy), clean)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if it % 6 == 0 or not loss.isfinite():
        print(f"it {it:3d}  loss {loss.item():.5f}  scale {scaler.get_scale():.0f}")
print("last loss", loss.item())
