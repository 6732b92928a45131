import torch.nn as nn
import torch.nn.functional as F


class ContrastiveLoss(nn.Module):
    """Pulls matching pairs together, pushes others beyond the margin."""

    def __init__(self, margin=1.0):
        super().__init__()
        self.margin = margin

    def forward(self, output1, output2, target):
        distances = (output2 - output1).pow(2).sum(1).sqrt()
        losses = target * distances.pow(2) + (1 - target) * F.relu(self.margin - distances).pow(2)
        return losses.mean()
