"""A generator and a critic with Lightning Fabric in float16: two optimizers, a scale that grows, clipping, accumulation."""

import lightning as L
import torch
from lightning.fabric.plugins import MixedPrecision
from torch import nn
from torch.nn import functional as F


class Generator(nn.Sequential):
    def __init__(self, noise=8, width=16):
        super().__init__(nn.Linear(noise, 32), nn.ReLU(), nn.Linear(32, width))


class Critic(nn.Sequential):
    def __init__(self, width=16):
        super().__init__(nn.Linear(width, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))


def float16(init_scale):
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=40))


def main(updates=60, accumulate=2):
    torch.set_num_threads(1)
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=float16(4096.0))
    fabric.seed_everything(0, verbose=False)
    generator, g_optimizer = fabric.setup(g := Generator(), torch.optim.Adam(g.parameters(), 2e-3, betas=(0.5, 0.9)))
    critic, c_optimizer = fabric.setup(c := Critic(), torch.optim.Adam(c.parameters(), 2e-3, betas=(0.5, 0.9)))
    mix = torch.randn(3, 16)
    for update in range(updates):
        for part in range(accumulate):
            real = torch.tanh(torch.randn(16, 3) @ mix)
            fake = generator(torch.randn(16, 8)).detach()
            with fabric.no_backward_sync(critic, enabled=part + 1 < accumulate):
                c_loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()
                fabric.backward(c_loss / accumulate)
        c_norm = fabric.clip_gradients(critic, c_optimizer, max_norm=5.0, error_if_nonfinite=False)
        c_optimizer.step()
        c_optimizer.zero_grad()

        g_loss = F.softplus(-critic(generator(torch.randn(32, 8)))).mean()
        fabric.backward(g_loss)
        g_optimizer.step()
        g_optimizer.zero_grad()
        c_optimizer.zero_grad()
        if update % 15 == 0:
            fabric.print(f"{update}: critic {c_loss.item():.3f} generator {g_loss.item():.3f} norm {c_norm.item():.3f}")


if __name__ == "__main__":
    main()
