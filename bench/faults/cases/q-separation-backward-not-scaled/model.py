import torch
import torch.nn as nn


class SparseBandNet(nn.Module):
    """A mask for each source and each frequency band, from the magnitude spectrogram."""

    def __init__(self, sources, n_fft=128, width=24):
        super().__init__()
        self.n_fft = n_fft
        self.register_buffer("window", torch.hann_window(n_fft))
        self.encoder = nn.ModuleDict(
            {"low": nn.Conv1d(17, width, 3, padding=1), "high": nn.Conv1d(48, width, 3, padding=1)}
        )
        self.mix = nn.Sequential(nn.Conv1d(2 * width, 2 * width, 5, padding=2), nn.GELU())
        self.decoder = nn.Conv1d(2 * width, sources * 65, 1)
        self.sources = sources

    def forward(self, mixture):
        spec = torch.stft(mixture.float(), self.n_fft, window=self.window, return_complex=True)
        mag = spec.abs()
        bands = [self.encoder["low"](mag[:, :17]), self.encoder["high"](mag[:, 17:])]
        masks = torch.sigmoid(self.decoder(self.mix(torch.cat(bands, 1)))).float()
        masks = masks.unflatten(1, (self.sources, 65))
        stems = (masks * spec[:, None]).flatten(0, 1)
        wav = torch.istft(stems, self.n_fft, window=self.window, length=mixture.shape[-1])
        return wav.unflatten(0, (-1, self.sources))
