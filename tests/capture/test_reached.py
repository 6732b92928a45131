"""What a function can reach: modules, optimizers, and the code that it runs."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampguard.capture.compiled.reached import MAX_PARTS, codes_of, may_autocast, may_drive, modules_reached, of_kind


class Trainer:
    def __init__(self) -> None:
        self.net = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)

    def step(self, x: Tensor) -> None:
        self.loss_of(x).backward()

    def loss_of(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.net(x).mean()


def test_modules_in_a_closure_and_among_arguments() -> None:
    net = nn.Linear(2, 2)

    def helper(x: Tensor) -> None:
        x.backward()

    def function(x: Tensor) -> Any:
        helper(net(x))

    assert modules_reached(function, (1, net), {}) == {"net": net}
    assert any("backward" in code.co_names for code in codes_of(function))


def test_what_a_helper_calls_is_reached_too() -> None:
    net = nn.Linear(2, 2)

    def helper(x: Tensor) -> Tensor:
        return net(x).mean()  # type: ignore[no-any-return]

    def function(x: Tensor) -> None:
        helper(x).backward()

    assert list(modules_reached(function, (), {}).values()) == [net]


def test_the_object_of_a_method() -> None:
    trainer = Trainer()
    assert modules_reached(trainer.step, (), {}) == {"self.net": trainer.net}
    assert list(of_kind(Optimizer, trainer.step, (), {}).values()) == [trainer.optimizer]
    assert may_drive(trainer.step, (), {})
    assert not may_drive(trainer.loss_of, (), {})
    assert may_autocast(trainer.step)


def test_a_part_of_another_module_is_no_root() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    head = net[0]

    def function(x: Tensor) -> Tensor:
        return head(net(x))  # type: ignore[no-any-return]

    assert list(modules_reached(function, (), {}).values()) == [net]


def test_partial_and_containers() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)

    def function(models: dict[str, nn.Module], x: Tensor) -> Tensor:
        return models["first"](x) + second(x)  # type: ignore[no-any-return]

    bound = functools.partial(function, {"first": first})
    assert set(modules_reached(bound, (), {}).values()) == {first, second}
    assert not may_drive(bound, (), {})
    many = {str(i): nn.ReLU() for i in range(MAX_PARTS + 1)}
    assert modules_reached(function, (many,), {}) == {"second": second}
