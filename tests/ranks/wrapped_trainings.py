"""Short trainings with DistributedDataParallel that do not only call it, each under a guard of its own.

Takes their names; the run folder of each is named after it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn import functional as distributed_functions
from torch.nn.parallel import DistributedDataParallel

import ampguard

STEPS = 10
Made = tuple[DistributedDataParallel, torch.optim.Optimizer]


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.value = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.value(self.body(x).tanh())


class Loss(nn.Module):
    """A module around the bare model."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, x: Tensor) -> Tensor:
        return self.policy(x).square().mean()


def make() -> Made:
    torch.manual_seed(0)
    model = DistributedDataParallel(Policy())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + dist.get_rank())
    return model, optimizer


def updates(optimizer: torch.optim.Optimizer, steps: int = STEPS) -> Iterator[Tensor]:
    """Gives a batch; makes an update after each."""
    for _ in range(steps):
        optimizer.zero_grad()
        yield torch.randn(4, 8)
        optimizer.step()


def never_called(made: Made | None = None) -> None:
    model, optimizer = made or make()
    for x in updates(optimizer):
        model.module(x).square().mean().backward()


def called_without_gradients() -> None:
    """The wrapper acts, the bare model is trained."""
    model, optimizer = make()
    for x in updates(optimizer):
        with torch.no_grad():
            acted = model(x)
        (model.module(x) - acted - 1).square().mean().backward()


def called_before() -> None:
    """The wrapper is trained for a while, and the model without it from then on."""
    model, optimizer = make()
    for i, x in enumerate(updates(optimizer)):
        (model if i < 4 else model.module)(x).square().mean().backward()


def inside_another() -> None:
    model, optimizer = make()
    loss = Loss(model.module)
    for x in updates(optimizer):
        loss(x).backward()


def a_part() -> None:
    model, optimizer = make()
    for x in updates(optimizer):
        model.module.value(x).square().mean().backward()


class Headed(nn.Module):
    """A wrapped body and a head. `is_spread`: the head sees the features of all ranks."""

    def __init__(self, is_spread: bool = False) -> None:
        super().__init__()
        self.body = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
        self.head = nn.Linear(8, 4, bias=False)
        self.is_spread = is_spread

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        if self.is_spread:
            features = torch.cat(distributed_functions.all_gather(features))
        return self.head(features)


def headed(is_spread: bool = False, head_seed: int = 0) -> tuple[Headed, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Headed(is_spread)
    torch.manual_seed(head_seed)
    nn.init.normal_(model.head.weight)
    torch.manual_seed(100 + dist.get_rank())
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def head_outside() -> None:
    model, optimizer = headed()
    for x in updates(optimizer):
        (model(x) - 1).square().mean().backward()


def criterion_outside() -> None:
    """It has weights of its own, and is called beside the model."""
    model, optimizer = make()
    torch.manual_seed(0)
    criterion = nn.Linear(1, 3, bias=False)
    torch.manual_seed(100 + dist.get_rank())
    optimizer.add_param_group({"params": criterion.parameters()})
    for x in updates(optimizer):
        (criterion(model(x)) - 1).square().mean().backward()


def own_head_outside() -> None:
    """Each rank has begun with a head of its own."""
    model, optimizer = headed(head_seed=dist.get_rank())
    for x in updates(optimizer):
        (model(x) - 1).square().mean().backward()


def spread_head_outside() -> None:
    """Each rank's head gives other classes to the features of all."""
    model, optimizer = headed(is_spread=True)
    for x in updates(optimizer):
        (model(x) - dist.get_rank()).square().mean().backward()


def head_averaged_by_hand() -> None:
    model, optimizer = headed()
    for x in updates(optimizer):
        (model(x) - 1).square().mean().backward()
        dist.all_reduce(model.head.weight.grad)


def accumulated() -> None:
    model, optimizer = make()
    for x in updates(optimizer):
        with model.no_sync():
            model(x).square().mean().backward()
        model(x).square().mean().backward()


def evaluated() -> None:
    """Evaluation of the bare model, once with gradients on."""
    model, optimizer = make()
    for x in updates(optimizer):
        model(x).square().mean().backward()
        with torch.no_grad():
            model.module(x)
        model.module(x)


def frozen() -> None:
    """A DDP model that is no longer trained gives features to a model of each rank's own."""
    model, _ = make()
    model.requires_grad_(False)
    torch.manual_seed(dist.get_rank())
    head = nn.Linear(1, 1)
    for x in updates(torch.optim.SGD(head.parameters(), lr=0.1)):
        head(model.module(x)).square().mean().backward()


def unused() -> None:
    make()
    model, optimizer = make()
    for x in updates(optimizer):
        model(x).square().mean().backward()


def on_their_own() -> None:
    """Said to be on purpose: each rank trains its own for a while."""
    model, optimizer = make()
    for x in updates(optimizer):
        with model.no_sync():
            model.module(x).square().mean().backward()


def averaged_by_hand() -> None:
    model, optimizer = make()
    for x in updates(optimizer):
        model.module(x).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)


def two_players() -> None:
    """Each is trained in steps of its own, through the other's bare model."""
    (one, first), (other, second) = make(), make()
    for x in updates(first):
        (one(x) * other.module(x)).square().mean().backward()
        for y in updates(second, 1):
            (one.module(y).detach() * other(y)).square().mean().backward()


def main() -> None:
    """`made_before`: the guard begins when the model is there already."""
    plain = DistributedDataParallel.__init__, DistributedDataParallel.no_sync
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        made = make() if name == "made_before" else None
        with ampguard.watch(out=Path(name)):
            never_called(made) if made is not None else globals()[name]()
        dist.barrier()
    assert plain == (DistributedDataParallel.__init__, DistributedDataParallel.no_sync)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
