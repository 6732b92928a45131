"""Predict the hidden part of satellite tiles with Lightning Fabric (bf16), gradients accumulated over two batches.

The targets are whitened per tile, as in masked image modelling with normalised pixels.
"""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Tiles(Dataset):
    """Four bands of 6 x 6 pixels; at the edge of an orbit a tile holds nothing but the fill value."""

    def __init__(self, n=320):
        g = torch.Generator().manual_seed(31)
        field = torch.randn(n, 4, 3, 3, generator=g)
        self.pixels = F.interpolate(field, size=(6, 6), mode="bilinear") + 0.05 * torch.randn(n, 4, 6, 6, generator=g)
        self.pixels[[171, 172]] = -0.5

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, i):
        return self.pixels[i]


class Predictor(nn.Module):
    def __init__(self, width=4 * 36, dim=64):
        super().__init__()
        self.embed = nn.Linear(width, dim)
        self.trunk = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))
        self.head = nn.Linear(dim, width)

    def forward(self, x):
        h = self.embed(x.flatten(1))
        return self.head(h + self.trunk(h))


class WhitenedLoss(nn.Module):
    def forward(self, prediction, tiles, hidden):
        target = tiles.flatten(1)
        centred = target - target.mean(1, keepdim=True)
        target = centred / centred.std(1, keepdim=True)
        return ((prediction - target) ** 2 * hidden).sum() / hidden.sum()


def main(accumulate=2):
    torch.set_num_threads(1)
    fabric = L.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    fabric.seed_everything(4, verbose=False)
    model = Predictor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(Tiles(), batch_size=8))
    criterion = WhitenedLoss()
    for i, tiles in enumerate(loader):
        hidden = (torch.rand(len(tiles), 4 * 36) < 0.6).float()
        visible = (tiles.flatten(1) * (1 - hidden)).view_as(tiles)
        window_ends = (i + 1) % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not window_ends):
            loss = criterion(model(visible), tiles, hidden)
            fabric.backward(loss / accumulate)
        if window_ends:
            fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
        if i % 8 == 0:
            fabric.print(f"batch {i}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
