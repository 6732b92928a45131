"""A scaler of the script's own, an object that is called (MAE, Swin, ConvNeXt), returns the norm of the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


def norm_of(parameters: Iterable[Tensor]) -> Tensor:
    return torch.norm(torch.stack([torch.norm(p.grad.detach()) for p in parameters if p.grad is not None]))


class Scaler:
    def __init__(self, unscales: bool) -> None:
        self._unscales = unscales
        self._scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def __call__(self, loss: Tensor, optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> Tensor:
        self._scaler.scale(loss).backward()
        if self._unscales:
            self._scaler.unscale_(optimizer)
        norm = norm_of(parameters)
        self._scaler.step(optimizer)
        self._scaler.update()
        return norm


class Meter:
    def __init__(self) -> None:
        self.values: list[float] = []

    def update(self, **values: Any) -> None:
        self.values += [float(value) for value in values.values()]


class Loop:
    def __init__(self, unscales: bool) -> None:
        torch.manual_seed(0)
        self.model, self.meter = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)), Meter()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.scaler = Scaler(unscales)

    def loss(self) -> Tensor:
        x = torch.randn(8, 6)
        with torch.autocast("cpu", torch.float16):
            loss = (self.model(x).float() - x.sum(1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        return loss


def shows(loop: Loop) -> None:
    for _ in range(8):
        loss = loop.loss()
        norm = loop.scaler(loss, loop.optimizer, parameters=loop.model.parameters())
        loop.meter.update(loss=loss.item(), grad_norm=norm)


def shows_nothing(loop: Loop) -> None:
    for _ in range(8):
        loss = loop.loss()
        loop.scaler(loss, loop.optimizer, parameters=loop.model.parameters())
        loop.meter.update(loss=loss.item())


@pytest.mark.parametrize(
    ("train", "unscales", "causes"),
    [(shows, False, ["clip-before-unscale"]), (shows_nothing, False, []), (shows, True, [])],
)
def test_a_norm_that_is_logged_by_whoever_called_it(
    train: Callable[[Loop], None], unscales: bool, causes: list[str], guard: Guard
) -> None:
    run = guard(lambda: train(Loop(unscales)))
    assert run.faults == 0, run.stderr
    assert run.causes == causes
    assert all(i.severity == "warning" for i in run.report.incidents)
