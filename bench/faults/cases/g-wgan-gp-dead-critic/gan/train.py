"""WGAN-GP on a ring of Gaussians: python -m gan.train"""

import math

import torch

from gan.nets import Critic, Generator
from gan.penalty import gradient_penalty


def ring(n, g):
    k = torch.randint(0, 8, (n,), generator=g)
    centre = torch.stack([torch.cos(k * math.pi / 4), torch.sin(k * math.pi / 4)], 1)
    return 2 * centre + 0.05 * torch.randn(n, 2, generator=g)


def main(steps=150, batch=48):
    torch.set_num_threads(1)
    torch.manual_seed(3)
    g = torch.Generator().manual_seed(0)
    gen, critic = Generator(), Critic()
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.9))
    opt_c = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
    for step in range(steps):
        real = ring(batch, g)
        fake = gen(torch.randn(batch, 4)).detach()
        opt_c.zero_grad()
        wasserstein = critic(fake).mean() - critic(real).mean()
        gp = gradient_penalty(critic, real, fake)
        loss_c = wasserstein + gp
        loss_c.backward()
        opt_c.step()

        opt_g.zero_grad()
        loss_g = -critic(gen(torch.randn(batch, 4))).mean()
        loss_g.backward()
        opt_g.step()
        if step % 10 == 0:
            print(f"[{step}] critic {wasserstein.item():.4f} gp {gp.item():.4f} gen {loss_g.item():.4f}")


if __name__ == "__main__":
    main()
