"""Layers that are put in or unfrozen between the building of the optimizer and the first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
STEPS = 12


class Adapter(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Parameter(torch.randn(2, inner.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(inner.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x @ self.down.T @ self.up.T  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))  # type: ignore[no-any-return]


def frozen_body() -> Net:
    torch.manual_seed(0)
    net = Net()
    net.body.requires_grad_(False)
    return net


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, after: Callable[[], object] = lambda: None) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for _ in range(STEPS):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.randn(16, 6)).float().pow(2).mean()
        scaler.scale(loss).backward()
        for opt in optimizers:
            scaler.step(opt)
            opt.zero_grad()
        scaler.update()
        after()


def adapted_late() -> None:
    net = frozen_body()
    opt = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05)
    net.body = Adapter(net.body)
    train(net, opt)


def unfrozen_late() -> None:
    net = frozen_body()
    opt = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05)
    net.requires_grad_(True)
    train(net, opt)


@pytest.mark.parametrize(
    ("body", "names", "was"),
    [
        (adapted_late, "`body.down`, `body.up`", "were not there"),
        (unfrozen_late, "`body.weight`, `body.bias`", "were frozen"),
    ],
)
def test_nobody_updates_them(body: Callable[[], None], names: str, was: str, guard: Guard) -> None:
    (incident,) = guard(body).report.incidents
    assert (incident.cause, incident.severity, incident.module) == ("stale-parameters", "warning", "body")
    assert incident.step == 0
    assert incident.explanation.startswith(f"{names} {was} when `opt` was built at ")
    assert incident.fixes[0].how.startswith("build opt after `body")


def adapted_first() -> None:
    net = frozen_body()
    net.body = Adapter(net.body)
    train(net, torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05))


def with_an_optimizer_of_their_own() -> None:
    net = frozen_body()
    opt = torch.optim.SGD(net.head.parameters(), lr=0.05)
    net.body = Adapter(net.body)
    train(net, opt, torch.optim.SGD([net.body.down, net.body.up], lr=0.05))


def moved_by_hand() -> None:
    net = frozen_body()
    opt = torch.optim.SGD(net.head.parameters(), lr=0.05)
    net.body = Adapter(net.body)

    def after() -> None:
        with torch.no_grad():
            for p in (net.body.down, net.body.up):
                p -= 0.01 / 64.0 * p.grad
                p.grad = None

    train(net, opt, after=after)


def left_out_of_a_second_model() -> None:
    """The body of the second is made after the first optimizer, and left out of its own, not frozen."""
    first = frozen_body()
    opt = torch.optim.SGD(first.head.parameters(), lr=0.05)
    second = Net()
    other = torch.optim.SGD(second.head.parameters(), lr=0.05)

    class Both(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return first(x) + second(x)  # type: ignore[no-any-return]

    train(Both(), opt, other)


def beside_a_loss_with_weights() -> None:
    """A perceptual loss whose weights are not frozen, in a module around both that is made last."""
    net = frozen_body()
    opt = torch.optim.SGD(net.head.parameters(), lr=0.05)

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.loss = net, nn.Sequential(nn.Linear(2, 4).requires_grad_(False), nn.Linear(4, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.loss(self.net(x))  # type: ignore[no-any-return]

    train(WithLoss(), opt)


@pytest.mark.parametrize(
    "body",
    [
        adapted_first,
        with_an_optimizer_of_their_own,
        moved_by_hand,
        left_out_of_a_second_model,
        beside_a_loss_with_weights,
    ],
)
def test_somebody_updates_them_or_they_are_left_out(body: Callable[[], None], guard: Guard) -> None:
    run = guard(body)
    assert run.faults == 0
    assert not run.report.incidents


def test_a_replaced_head_is_told_once(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = Net()
        opt = torch.optim.SGD(net.parameters(), lr=0.05)
        net.head = nn.Linear(8, 3)
        train(net, opt)

    (incident,) = guard(body).report.incidents
    assert (incident.cause, incident.severity) == ("stale-parameters", "error")
