"""Noise to waveform through a stack of small WaveNets, each refining what the one before it made."""

import torch
import torch.nn.functional as F
from torch import nn


class WaveNet(nn.Module):
    def __init__(self, channels=12, cond=4, layers=3):
        super().__init__()
        self.start = nn.Conv1d(1, channels, 1)
        self.filters = nn.ModuleList(
            nn.Conv1d(channels, channels, 3, padding=2**i, dilation=2**i) for i in range(layers)
        )
        self.gates = nn.ModuleList(nn.Conv1d(channels, channels, 3, padding=2**i, dilation=2**i) for i in range(layers))
        self.conds = nn.ModuleList(nn.Conv1d(cond, channels, 1) for _ in range(layers))
        self.end = nn.Conv1d(channels, 1, 1)

    def forward(self, x, condition):
        h = self.start(x)
        for f, g, c in zip(self.filters, self.gates, self.conds):
            h = h + torch.tanh(f(h) + c(condition)) * torch.sigmoid(g(h))
        return self.end(h)


class UniWaveNet(nn.Module):
    def __init__(self, flows=4):
        super().__init__()
        self.wavenet_list = nn.ModuleList(WaveNet() for _ in range(flows))

    def forward(self, noise, condition):
        x = noise
        for i, wavenet in enumerate(self.wavenet_list[1:]):
            x = (x if i == 0 else F.layer_norm(x, x.shape[-1:])) + wavenet(x, condition)
        return x


def spectral_loss(made, true, n_fft=32):
    window = torch.hann_window(n_fft)

    def magnitude(x):
        return torch.stft(x.squeeze(1).float(), n_fft, 8, window=window, return_complex=True).abs()

    return F.l1_loss(magnitude(made), magnitude(true))


def tones(generator, n=6, length=128):
    pitch = torch.randint(0, 4, (n,), generator=generator)
    t = torch.arange(length) / length
    wave = torch.sin(2 * torch.pi * (4 + 4 * pitch[:, None]) * t)[:, None]
    return wave, F.one_hot(pitch, 4).float()[..., None].expand(-1, -1, length)


torch.set_num_threads(1)
torch.manual_seed(13)
generator = torch.Generator().manual_seed(13)
model = UniWaveNet()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
print(f"{sum(p.numel() for p in model.parameters())} parameters in {len(model.wavenet_list)} flows")
for step in range(40):
    wave, condition = tones(generator)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = model(torch.randn(wave.shape, generator=generator), condition)
        loss = spectral_loss(made, wave)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
