"""Denoising autoencoder with Lightning Fabric in true half precision."""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F


class Denoiser(nn.Module):
    def __init__(self, width=48, hidden=96):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.LayerNorm(hidden))
        self.decoder = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def signals(count, batch, width=48):
    g = torch.Generator().manual_seed(6)
    basis = torch.randn(5, width, generator=g)
    for _ in range(count):
        clean = torch.tanh(torch.randn(batch, 5, generator=g) @ basis)
        yield clean + 0.2 * torch.randn(batch, width, generator=g), clean


def main():
    torch.set_num_threads(1)
    fabric = L.Fabric(accelerator="cpu", devices=1, precision="16-true")
    fabric.seed_everything(2, verbose=False)
    with fabric.init_module():
        model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, optimizer = fabric.setup(model, optimizer)
    for step, (noisy, clean) in enumerate(signals(24, 16)):
        loss = F.mse_loss(model(noisy), clean)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 0:
            fabric.print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
