"""Denoise low-sample path tracing. Residual network, loss in display space, two micro-batches per update."""

import torch
import torch.nn as nn

from tonemap import perceptual_l1


class ResBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c1 = nn.Conv2d(c, c, 3, padding=1)
        self.c2 = nn.Conv2d(c, c, 3, padding=1)

    def forward(self, x):
        return x + 0.2 * self.c2(torch.relu(self.c1(x)))


class Denoiser(nn.Module):
    def __init__(self, c=12):
        super().__init__()
        self.head = nn.Conv2d(3, c, 3, padding=1)
        self.body = nn.Sequential(*[ResBlock(c) for _ in range(3)])
        self.tail = nn.Conv2d(c, 3, 3, padding=1)
        nn.init.normal_(self.tail.weight, std=0.01)
        nn.init.zeros_(self.tail.bias)

    def forward(self, noisy):
        return noisy + self.tail(self.body(self.head(noisy)))


def renders(n, batch=4, size=20):
    g = torch.Generator().manual_seed(8)
    for i in range(n):
        exposure = 0.01 if i == 17 else 1.0  # a night scene
        clean = exposure * (0.4 + 0.6 * torch.rand(batch, 3, 1, 1, generator=g)) * torch.ones(batch, 3, size, size)
        noisy = clean * (1 + 0.15 * torch.randn(clean.shape, generator=g)).clamp_min(0.3)
        yield noisy, clean


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Denoiser()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    accum = 2
    for i, (noisy, clean) in enumerate(renders(24)):
        loss = perceptual_l1(model(noisy), clean) / accum
        loss.backward()
        if (i + 1) % accum == 0:
            opt.step()
            opt.zero_grad()
            print(f"update {i // accum} loss {loss.item() * accum:.5f}")


if __name__ == "__main__":
    main()
