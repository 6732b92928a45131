import torch.nn as nn


class Conformerish(nn.Module):
    def __init__(self, mels=20, dim=32, vocab=15, layers=2):
        super().__init__()
        self.subsample = nn.Conv1d(mels, dim, 3, stride=2, padding=1)
        self.encoders = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(dim),
                    "depthwise": nn.Conv1d(dim, dim, 5, padding=2, groups=dim),
                    "ffn": nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim)),
                }
            )
            for _ in range(layers)
        )
        self.ctc_lo = nn.Linear(dim, vocab)

    def forward(self, feats):
        x = self.subsample(feats.transpose(1, 2)).transpose(1, 2)
        for layer in self.encoders:
            x = x + layer["depthwise"](layer["norm"](x).transpose(1, 2)).transpose(1, 2)
            x = x + layer["ffn"](x)
        return self.ctc_lo(x)
