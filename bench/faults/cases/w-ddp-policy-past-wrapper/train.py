"""Policy gradients on a bandit with DistributedDataParallel, one environment a rank.

torchrun --nproc-per-node 2 train.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Policy(nn.Module):
    def __init__(self, width=8, arms=4):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, 32), nn.Tanh())
        self.logits = nn.Linear(32, arms)
        self.value = nn.Linear(32, 1)

    def forward(self, x):
        h = self.body(x)
        return self.logits(h), self.value(h).squeeze(1)


class Bandit:
    def __init__(self, seed, width=8, arms=4):
        self.g = torch.Generator().manual_seed(seed)
        self.pay = torch.randn(width, arms, generator=torch.Generator().manual_seed(99))

    def contexts(self, count):
        return torch.randn(count, 8, generator=self.g)

    def reward(self, x, arm):
        return torch.sigmoid(x @ self.pay).gather(1, arm[:, None]).squeeze(1)


def main(updates=40):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DistributedDataParallel(Policy())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    bandit = Bandit(seed=rank)
    torch.manual_seed(100 + rank)
    for update in range(updates):
        policy = model.module
        x = bandit.contexts(32)
        logits, value = policy(x)
        chosen = torch.distributions.Categorical(logits=logits)
        arm = chosen.sample()
        reward = bandit.reward(x, arm)
        advantage = (reward - value).detach()
        loss = -(chosen.log_prob(arm) * advantage).mean() + 0.5 * (reward - value).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if update % 10 == 0 and rank == 0:
            print(f"update {update} reward {reward.mean().item():.3f} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
