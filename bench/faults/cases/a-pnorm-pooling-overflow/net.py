import torch
import torch.nn as nn


class PNormPool(nn.Module):
    """Between mean pooling (p = 1) and max pooling (p = inf); p is raised during training."""

    def __init__(self, p=2.0):
        super().__init__()
        self.p = p

    def forward(self, x):
        powered = x.pow(self.p)
        return powered.mean(dim=(-2, -1)).pow(1.0 / self.p)


class Retrieval(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        layers = []
        for cin, cout in [(3, 16), (16, dim)]:
            layers.append(nn.Sequential(nn.Conv2d(cin, cout, 3, stride=2, padding=1), nn.BatchNorm2d(cout), nn.ELU()))
        self.trunk = nn.Sequential(*layers)
        self.pool = PNormPool()
        self.whiten = nn.Linear(dim, 16)

    def forward(self, img):
        x = self.trunk(img) + 1.5
        return nn.functional.normalize(self.whiten(self.pool(x)), dim=-1)
