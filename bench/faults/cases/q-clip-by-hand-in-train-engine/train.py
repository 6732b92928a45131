import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

from engine import Engine, noise_like


class TimeMLP(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t):
        return self.net(t[:, None])


class Denoiser(nn.Module):
    def __init__(self, channels=4, dim=24):
        super().__init__()
        self.time = TimeMLP(dim)
        self.enter, self.mid, self.leave = (
            nn.Conv2d(channels, dim, 3, padding=1), nn.Conv2d(dim, dim, 3, padding=1), nn.Conv2d(dim, channels, 3, padding=1)
        )  # fmt: skip

    def forward(self, x, t):
        h = self.enter(x) + self.time(t)[:, :, None, None]
        return self.leave(F.silu(self.mid(F.silu(h))))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--clip-grad-scale", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=25)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    unet = Denoiser()
    engine = Engine(
        unet, torch.optim.AdamW(unet.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=2.0**12),
        args.clip_grad_scale,
    )  # fmt: skip
    for step in range(args.steps):
        latents = torch.randn(6, 4, 8, 8, generator=generator)
        t = torch.rand(6, generator=generator)
        noise = noise_like(latents, generator)
        noisy = latents * (1 - t)[:, None, None, None] + noise * t[:, None, None, None]
        with torch.autocast("cpu", dtype=torch.float16):
            prediction = unet(noisy, t)
        loss = F.mse_loss(prediction.float(), noise)
        engine.step(loss)
        if step % 5 == 0:
            print(f"{step:4d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
