from typing import NamedTuple

import torch
from torch import nn


class Decision(NamedTuple):
    log_prob: torch.Tensor
    entropy: torch.Tensor
    action: torch.Tensor


class PointerPolicy(nn.Module):
    """Scores the open jobs of a machine; finished jobs are masked."""

    def __init__(self, feat=4, dim=24):
        super().__init__()
        self.jobs = nn.Sequential(nn.Linear(feat, dim), nn.Tanh(), nn.Linear(dim, dim))
        self.machine = nn.Linear(feat, dim)
        self.critic = nn.Linear(dim, 1)

    def scores(self, jobs, machine, open_jobs):
        u = torch.einsum("bjd,bd->bj", self.jobs(jobs), self.machine(machine))
        return torch.where(open_jobs, u, -1e9)

    def forward(self, jobs, machine, open_jobs):
        logp = self.scores(jobs, machine, open_jobs).log_softmax(-1)
        p = logp.exp()
        action = p.float().multinomial(1) if not torch.isnan(p).any() else p.argmax(-1, keepdim=True)
        entropy = -(p * logp.clamp(min=-100)).sum(-1)
        return Decision(logp.gather(-1, action).squeeze(-1), entropy, action)
