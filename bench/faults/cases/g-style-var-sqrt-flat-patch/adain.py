import torch
from torch import nn


def calc_mean_std(feat):
    n, c = feat.shape[:2]
    flat = feat.reshape(n, c, -1)
    std = flat.var(dim=2).sqrt().view(n, c, 1, 1)
    return flat.mean(dim=2).view(n, c, 1, 1), std


def style_loss(feats, style_feats):
    loss = 0.0
    for f, s in zip(feats, style_feats):
        (fm, fs), (sm, ss) = calc_mean_std(f), calc_mean_std(s)
        loss = loss + nn.functional.mse_loss(fm, sm) + nn.functional.mse_loss(fs, ss)
    return loss


class Encoder(nn.Module):
    """Stands for VGG: fixed filters whose statistics describe the style."""

    def __init__(self):
        super().__init__()
        self.stage1 = nn.Conv2d(3, 12, 3, stride=2)
        self.stage2 = nn.Conv2d(12, 24, 3, stride=2)
        self.requires_grad_(False)

    def forward(self, x):
        a = torch.tanh(self.stage1(x))
        return a, torch.tanh(self.stage2(a))


class Transfer(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 1), nn.SiLU(), nn.Conv2d(16, 16, 1), nn.SiLU())
        self.to_rgb = nn.Conv2d(16, 3, 1)

    def forward(self, content):
        return torch.sigmoid(self.to_rgb(self.body(content)))
