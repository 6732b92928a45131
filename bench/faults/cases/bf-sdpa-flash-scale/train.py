"""Classify spectra by attention over their bands; the counts are raw, and attention keeps them in float32's range."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
torch.manual_seed(4)


class BandAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.shared = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)

    def forward(self, x, content):
        qk, v = self.shared(x).unsqueeze(1), self.value(content).unsqueeze(1)
        return F.scaled_dot_product_attention(qk, qk, v).squeeze(1)


class Spectra(nn.Module):
    def __init__(self, bands=16, dim=256, classes=4):
        super().__init__()
        self.embed = nn.Linear(1, dim, bias=False)
        self.attention = BandAttention(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, counts):
        x = self.embed(counts.unsqueeze(-1))
        content = F.normalize(x, dim=-1)
        return self.head(self.attention(x, content).mean(1))


def spectra(steps, batch=8, bands=16):
    g = torch.Generator().manual_seed(6)
    for step in range(steps):
        counts = torch.rand(batch, bands, generator=g)
        label = (counts.argmax(1) // 4).long()
        if step == 9:
            counts[3] *= 6e18  # photons per steradian and year: another unit
        yield counts, label


net = Spectra()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for step, (counts, label) in enumerate(spectra(20)):
    optimizer.zero_grad()
    loss = F.cross_entropy(net(counts), label)
    loss.backward()
    optimizer.step()
    if step % 4 == 0 or not loss.isfinite():
        print(f"step {step:3d}  loss {loss.item():.4f}")
