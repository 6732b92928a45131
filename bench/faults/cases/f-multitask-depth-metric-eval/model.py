from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class SceneOutput:
    segmentation: torch.Tensor
    depth: torch.Tensor
    log_depth: torch.Tensor


class SegmentationHead(nn.Module):
    def __init__(self, dim, classes):
        super().__init__()
        self.classify = nn.Conv2d(dim, classes, 1)

    def forward(self, features):
        return self.classify(features), None


class DepthHead(nn.Module):
    """Metric depth; its logarithm is what the scale-invariant error is made of."""

    def __init__(self, dim, hidden=16):
        super().__init__()
        self.refine = nn.Sequential(nn.Conv2d(dim, hidden, 3, padding=1), nn.GELU(), nn.Conv2d(hidden, 1, 1))

    def forward(self, features):
        depth = self.refine(features)
        if self.training:
            depth = F.softplus(depth)  # keeps the loss differentiable everywhere
        log_depth = torch.log(depth)
        return depth, log_depth


class SceneNet(nn.Module):
    def __init__(self, dim=24, classes=5):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, dim, 3, padding=1),
            nn.BatchNorm2d(dim),
            nn.ReLU(inplace=True),
            nn.Conv2d(dim, dim, 3, stride=2, padding=1),
            nn.BatchNorm2d(dim),
            nn.ReLU(inplace=True),
        )
        self.heads = nn.ModuleDict({"segmentation": SegmentationHead(dim, classes), "depth": DepthHead(dim)})

    def forward(self, image) -> SceneOutput:
        features = self.stem(image)
        out = {name: head(features) for name, head in self.heads.items()}
        return SceneOutput(out["segmentation"][0], *out["depth"])
