import torch
import torch.nn as nn

NEG = float("-inf")


def log_sum_exp(x, dim):
    top = x.max(dim=dim, keepdim=True).values
    return (top + (x - top).exp().sum(dim=dim, keepdim=True).log()).squeeze(dim)


class CRF(nn.Module):
    """Linear chain. Tags: 0 = O, 1 = B, 2 = I. I may follow B or I only."""

    def __init__(self, tags=3):
        super().__init__()
        self.transitions = nn.Parameter(0.1 * torch.randn(tags, tags))
        forbidden = torch.zeros(tags, tags)
        forbidden[0, 2] = NEG
        self.register_buffer("forbidden", forbidden)
        self.register_buffer("start", torch.tensor([0.0, 0.0, NEG]))

    def partition(self, emissions, allowed=None):
        trans = self.transitions + self.forbidden
        if allowed is not None:
            emissions = emissions.masked_fill(~allowed, NEG)
        alpha = self.start + emissions[:, 0]
        for t in range(1, emissions.shape[1]):
            alpha = log_sum_exp(alpha.unsqueeze(2) + trans, dim=1) + emissions[:, t]
        return log_sum_exp(alpha, dim=1)

    def forward(self, emissions, allowed):
        """Negative log-likelihood of all the taggings that agree with a partial annotation."""
        return (self.partition(emissions) - self.partition(emissions, allowed)).mean()
