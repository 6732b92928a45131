"""A VAE on sensor windows with Accelerate (bf16)."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Encoder(nn.Module):
    def __init__(self, width, latent):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.mu = nn.Linear(64, latent)
        self.logvar = nn.Linear(64, latent)

    def forward(self, x):
        h = self.body(x)
        return self.mu(h), self.logvar(h)


class VAE(nn.Module):
    def __init__(self, width=32, latent=8):
        super().__init__()
        self.encoder = Encoder(width, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, width))

    def forward(self, x):
        mu, logvar = self.encoder(x)
        z = mu + torch.randn_like(mu) * (0.5 * logvar.clamp(max=20)).exp()
        return self.decoder(z), mu, logvar


def elbo(recon, x, mu, logvar, beta=0.1):
    rec = F.mse_loss(recon, x, reduction="sum") / x.shape[0]
    spread = logvar.float().exp()
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - spread) / x.shape[0]
    return rec + beta * kld, kld


def windows(n=640):
    g = torch.Generator().manual_seed(11)
    t = torch.linspace(0, 6, 32)
    x = torch.sin(t[None] * torch.rand(n, 1, generator=g) * 3) + 0.1 * torch.randn(n, 32, generator=g)
    spikes = torch.rand(n, generator=g) < 0.004  # the sensor saturates now and then and reports raw counts
    x[spikes] = 4095.0
    return x


def main():
    torch.set_num_threads(1)
    set_seed(2)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(windows()), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, (x,) in enumerate(loader):
        with accelerator.autocast():
            recon, mu, logvar = model(x)
            loss, kld = elbo(recon, x, mu, logvar)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 or not torch.isfinite(loss):
            accelerator.print(f"{step:3d} loss {loss.item():.3f} kld {kld.item():.3f}")


if __name__ == "__main__":
    main()
