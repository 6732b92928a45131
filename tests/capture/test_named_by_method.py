"""A part that a module's own method calls is named from that module on, whatever the method calls its object."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import Watched

Guard = Callable[..., Watched]


class Ratio(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.sum(1, keepdim=True)


def decorated(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(method)
    def call(*args: Any) -> Tensor:
        return method(*args)

    return call


class Task(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), Ratio())
        nn.init.constant_(self.net[0].weight, 0.1)

    def with_self(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        return result.square().mean()

    def with_another_name(this, x: Tensor) -> Tensor:  # noqa: N805
        result: Tensor = this.net(x)
        return result.square().mean()

    @decorated
    def with_a_decorator(this, x: Tensor) -> Tensor:  # noqa: N805
        result: Tensor = this.net(x)
        return result.square().mean()


def no_method(task: Task, x: Tensor) -> Tensor:
    result: Tensor = task.net(x)
    return result.square().mean()


@pytest.mark.parametrize(
    ("loss_of", "module"),
    [
        (Task.with_self, "net.2"),
        (Task.with_another_name, "net.2"),
        (Task.with_a_decorator, "net.2"),
        (no_method, "2"),
    ],
)
def test_the_method_that_calls_a_part(guard: Guard, loss_of: Callable[[Task, Tensor], Tensor], module: str) -> None:
    def made() -> tuple[Callable[[Tensor], Tensor], torch.optim.Optimizer]:
        """No variable of the loop holds the module, as in a Trainer's."""
        task = Task()
        return functools.partial(loss_of, task), torch.optim.SGD(task.parameters(), lr=1e-3)

    def body() -> None:
        torch.manual_seed(0)
        compute, optimizer = made()
        for step in range(4):
            loss = compute(torch.rand(4, 3) - 100.0 * (step == 2))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0
    assert (run.first.cause, run.first.step, run.first.module) == ("division-by-zero", 2, module)
