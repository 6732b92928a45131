"""Short trainings without any wrapper, most of which average their gradients by hand, each under a guard of its own.

Takes their names; the run folder of each is named after it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from each_guarded import each_guarded
from torch import Tensor, nn


def make(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))


def train(model: nn.Module, averaged: bool = True, steps: int = 10) -> Iterator[int]:
    """Gives the number of each step before it is made."""
    torch.manual_seed(100 + dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        x = torch.randn(8, 6)
        loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters() if averaged else ():
            grad: Tensor = p.grad
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
        yield step
        optimizer.step()


def own_beginnings() -> None:
    """Nobody has sent the weights of rank 0 to the others."""
    list(train(make(dist.get_rank())))


def written_to_by_one() -> None:
    model = make(0)
    for step in train(model):
        if step == 4 and dist.get_rank() == 1:
            with torch.no_grad():
                model[0].bias.add_(0.1)


def sent_at_first() -> None:
    model = make(dist.get_rank())
    for t in model.state_dict().values():
        dist.broadcast(t, src=0)
    list(train(model))


def independent() -> None:
    """Two runs of their own under one launch."""
    list(train(make(dist.get_rank()), averaged=False))


def one_beginning_two_ways() -> None:
    """The same weights at first, own batches, nothing averaged: an ensemble."""
    list(train(make(0), averaged=False))


if __name__ == "__main__":
    each_guarded(globals())
