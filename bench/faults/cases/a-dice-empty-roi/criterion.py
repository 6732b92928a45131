import torch
import torch.nn as nn
import torch.nn.functional as F


class DiceLoss(nn.Module):
    def forward(self, prob, target, roi):
        prob = prob * roi
        target = target * roi
        inter = (prob * target).sum((1, 2, 3))
        total = prob.sum((1, 2, 3)) + target.sum((1, 2, 3))
        dice = 2 * inter / total
        return (1 - dice).mean()


class RoiBCE(nn.Module):
    def forward(self, logits, target, roi):
        return (F.binary_cross_entropy_with_logits(logits, target, reduction="none") * roi).mean()


class SegLoss(nn.Module):
    def __init__(self, dice_weight=0.7):
        super().__init__()
        self.bce = RoiBCE()
        self.dice = DiceLoss()
        self.w = dice_weight

    def forward(self, logits, target, roi):
        logits = logits.float()
        return (1 - self.w) * self.bce(logits, target, roi) + self.w * self.dice(logits.sigmoid(), target, roi)
