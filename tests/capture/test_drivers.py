"""Modules whose forward is a whole training step: what they call is recorded, as in a loop of the script's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

Guard = Callable[..., Any]
STEPS = 8


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.log(self.body(x).relu() + x.amax(1, keepdim=True)))


class Engine(nn.Module):
    """`forward` trains."""

    def __init__(self, unscales: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Classifier()
        self.unscales = unscales
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.05)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(self.net(x).float(), y)
        self.opt.zero_grad()
        self.scaler.scale(loss).backward()
        if self.unscales:
            self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)  # clip
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.detach()


class Outer(nn.Module):
    """A wrapper around it, as DDP is under Lightning."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Tensor) -> Tensor:
        return self.module(*args)


def train(engine: Callable[..., Tensor], bad: int | None = None) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for step in range(STEPS):
        x, y = torch.rand(6, 4) + 0.1, torch.randint(0, 2, (6,))
        if step == bad:
            x[2] = -3.0
        losses.append(float(engine(x, y)))
    return losses


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_protocol_is_followed_inside(wrapped: bool, guard: Guard) -> None:
    def body() -> None:
        engine = Engine(unscales=False)
        train(Outer(engine) if wrapped else engine)

    run = guard(body)
    assert (run.faults, run.causes) == (0, ["clip-before-unscale"])
    assert run.first.location is not None
    assert run.first.location.code.endswith("# clip")
    assert run.first.step <= 1


def test_a_failure_inside_is_explained(guard: Guard) -> None:
    run = guard(lambda: train(Outer(Engine()), bad=5))
    assert (run.faults, run.causes) == (0, ["domain-error"])
    assert (run.first.step, run.first.op) == (5, "aten.log.default")
    assert any(fix.verified for fix in run.first.fixes)


def test_a_healthy_one_is_left_as_it_is(guard: Guard) -> None:
    plain = train(Outer(Engine()))
    run = guard(lambda: train(Outer(Engine())))
    assert (run.faults, run.causes, run.result, run.report.steps) == (0, [], plain, STEPS)


def test_a_derivative_inside_a_model_is_a_part_of_it(guard: Guard) -> None:
    class Descent(nn.Module):
        """Goes down an energy by its own derivative."""

        def __init__(self) -> None:
            super().__init__()
            self.energy, self.head = nn.Linear(4, 1), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                point = x.detach().requires_grad_()
                self.energy(point).tanh().sum().backward(inputs=[point])
            return self.head(x - point.grad)

    def body() -> None:
        torch.manual_seed(0)
        model = Descent()
        opt = torch.optim.SGD(model.head.parameters(), lr=0.05)
        for _ in range(4):
            opt.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            opt.step()

    run = guard(body)
    assert (run.faults, run.causes) == (0, [])
    assert not run.session._recorder.drivers.known


def test_checkpointing_inside_a_model_drives_nothing(guard: Guard) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(checkpoint(self.first, x, use_reentrant=True))

    def body() -> None:
        torch.manual_seed(0)
        model = Checkpointed()
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(4):
            opt.zero_grad()
            model(torch.randn(3, 4).requires_grad_()).square().mean().backward()
            opt.step()

    run = guard(body)
    assert (run.faults, run.causes) == (0, [])
    assert not run.session._recorder.drivers.known
