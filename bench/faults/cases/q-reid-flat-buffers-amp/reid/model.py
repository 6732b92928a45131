import torch
import torch.nn as nn
import torch.nn.functional as F


class Baseline(nn.Module):
    def __init__(self, identities=8, dim=32):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, dim, 3, 2, 1), nn.ReLU()
        )
        self.heads = nn.ModuleDict(
            {"bnneck": nn.BatchNorm1d(dim), "classifier": nn.Linear(dim, identities, bias=False)}
        )

    def forward(self, batch):
        feat = self.backbone(batch["images"]).mean((2, 3))
        logits = self.heads["classifier"](self.heads["bnneck"](feat))
        targets = batch["targets"]
        return {
            "loss_cls": F.cross_entropy(logits, targets, label_smoothing=0.1),
            "loss_triplet": triplet_loss(feat.float(), targets),
        }


def triplet_loss(feat, targets, margin=0.3):
    dist = torch.cdist(feat, feat)
    same = targets[:, None] == targets[None]
    hardest_positive = dist.masked_fill(~same, 0).amax(1)
    hardest_negative = dist.masked_fill(same, 1e4).amin(1)
    return F.relu(hardest_positive - hardest_negative + margin).mean()
