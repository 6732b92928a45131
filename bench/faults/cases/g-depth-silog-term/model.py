import torch
from torch import nn
from torch.nn import functional as F


class Backbone(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return torch.tanh(self.conv2(torch.tanh(self.conv1(x))))


class DepthHead(nn.Module):
    def __init__(self, width, lam=1.0):
        super().__init__()
        self.pred = nn.Conv2d(width, 1, 1)
        self.lam = lam

    def forward(self, feats, targets=None):
        log_depth = self.pred(feats)
        if targets is None:
            return log_depth
        depth = targets["depth"]
        valid = depth > 0
        d = log_depth[valid] - depth[valid].log()
        return {"loss_silog": torch.sqrt((d**2).mean() - self.lam * d.mean() ** 2)}


class NormalHead(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.pred = nn.Conv2d(width, 3, 1)

    def forward(self, feats, targets):
        cos = F.cosine_similarity(self.pred(feats), targets["normal"], dim=1)
        return {"loss_normal": (1 - cos).mean()}


class SegHead(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.pred = nn.Conv2d(width, classes, 1)

    def forward(self, feats, targets):
        return {"loss_seg": F.cross_entropy(self.pred(feats), targets["seg"])}


class MultiTask(nn.Module):
    def __init__(self, width=16, classes=4):
        super().__init__()
        self.backbone = Backbone(width)
        self.heads = nn.ModuleDict(
            {"seg": SegHead(width, classes), "depth": DepthHead(width), "normal": NormalHead(width)}
        )

    def forward(self, images, targets):
        feats = self.backbone(images)
        losses = {}
        for head in self.heads.values():
            losses.update(head(feats, targets))
        return losses
