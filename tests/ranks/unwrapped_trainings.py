"""Short trainings without any wrapper, most of which average their gradients by hand, each under a guard of its own.

Takes their names; the run folder of each is named after it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from each_guarded import each_guarded
from torch import Tensor, nn
from torch.distributed.nn import functional as distributed_functions
from torch.nn.utils import parameters_to_vector, vector_to_parameters


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


def averaged_behind_unscale() -> None:
    """The scaler of each rank has looked at its own gradients before it gets those of the others, of one odd batch."""
    model = make(0)
    torch.manual_seed(100 + dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(12):
        x = torch.randn(8, 6)
        with torch.autocast("cpu", dtype=torch.float16):
            y = model(x)
        is_odd = step == 5 and dist.get_rank() == 0
        loss = (y.float().squeeze(1) - x.sum(1) * (4000.0 if is_odd else 1.0)).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for p in model.parameters():
            dist.all_reduce(p.grad)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def independent() -> None:
    """Two runs of their own under one launch."""
    list(train(make(dist.get_rank()), averaged=False))


def one_beginning_two_ways() -> None:
    """The same weights at first, own batches, nothing averaged: an ensemble."""
    list(train(make(0), averaged=False))


class Parts(nn.Module):
    """A body and a head. `is_spread`: the body has half of its units on each rank, and sums up what they give."""

    def __init__(self, is_spread: bool = False) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 12), nn.Linear(12, 1)
        self.is_spread = is_spread

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(self.body(x))
        if self.is_spread:
            hidden = distributed_functions.all_reduce(hidden)
        result: Tensor = self.head(hidden)
        return result


def average(parameters: list[nn.Parameter], is_flat: bool) -> None:
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not is_flat:
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        return
    flat = parameters_to_vector(gradients)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    vector_to_parameters(flat, gradients)


def train_parts(model: Parts, which: nn.Module | None, is_flat: bool = False, constant: float | None = None) -> None:
    """`which`: the part whose gradients are averaged. `constant`: the head's gradients in every step, instead of the loss."""
    torch.manual_seed(100 + dist.get_rank())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(10):
        x = torch.randn(8, 6)
        loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if which is not None:
            average(list(which.parameters()), is_flat)
        if constant is not None:
            model.head.bias.grad = torch.full((1,), constant)
        figures = torch.stack([loss.detach(), x.mean()])
        dist.all_reduce(figures)
        optimizer.step()


def made_of_parts(seed: int, is_spread: bool = False) -> Parts:
    torch.manual_seed(seed)
    return Parts(is_spread)


def head_forgotten() -> None:
    model = made_of_parts(0)
    train_parts(model, model.body)


def body_forgotten_in_flat_gradients() -> None:
    model = made_of_parts(0)
    train_parts(model, model.head, is_flat=True)


def own_heads() -> None:
    """Each rank has a head of its own from the beginning."""
    model = made_of_parts(0)
    torch.manual_seed(dist.get_rank())
    model.head.reset_parameters()
    train_parts(model, model.body)


def spread_body() -> None:
    """Each rank has its own part of a layer, which began as that of the other one."""
    model = made_of_parts(0, is_spread=True)
    train_parts(model, model.head)


def one_gradient_by_chance() -> None:
    """Runs of their own, which show their losses together."""
    train_parts(made_of_parts(0), None, constant=0.1)


if __name__ == "__main__":
    each_guarded(globals())
