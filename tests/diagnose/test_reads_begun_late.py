"""Gradients that a script begins to read or to divide in the middle of a run: noticed in the very iteration."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Guard = Callable[..., Any]
SCALE = 256.0


@pytest.fixture(autouse=True)
def no_collection_in_between() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Loop:
    """A loop with a hole between backward and the scaler's step, and the iterations in which something is put there."""

    def __init__(self, hole: Callable[[Loop], object], first: int, every: int = 1, steps: int = 60) -> None:
        self.hole, self.first, self.every, self.steps = hole, first, every, steps
        self.log: list[object] = []

    def step(self, i: int) -> Any:
        x = torch.randn(8, 6)
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.model(x)
        self.optimizer.zero_grad()
        self.scaler.scale(F.cross_entropy(out.float(), x[:, :3].argmax(1))).backward()
        found = self.hole(self) if i >= self.first and (i - self.first) % self.every == 0 else None
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return i, found

    def __call__(self) -> list[object]:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        self.use()
        return self.log

    def use(self) -> None:
        for i in range(self.steps):
            self.step(i)


class ShownByCaller(Loop):
    def use(self) -> None:
        for i in range(self.steps):
            _, norm = self.step(i)
            if norm is not None:
                self.log.append(f"{norm.item():.3f}")


class DividedByCaller(Loop):
    def use(self) -> None:
        for i in range(self.steps):
            _, norm = self.step(i)
            if norm is not None:
                self.log.append(f"{(norm / self.scaler.get_scale()).item():.3f}")


class InDictionary(Loop):
    """The step's numbers are returned by their names."""

    def named(self, i: int) -> dict[str, Any]:
        x = torch.randn(8, 6)
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.model(x)
        loss = F.cross_entropy(out.float(), x[:, :3].argmax(1))
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        result = {"loss": loss.detach()}
        result["norm"] = returned(self)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return result

    def use(self) -> None:
        norms = []
        for i in range(self.steps):
            out = self.named(i)
            norms.append(out["norm"].item())
        self.log.append(f"{sum(norms) / len(norms):.3f}")


class OtherOfDictionary(InDictionary):
    def use(self) -> None:
        for i in range(self.steps):
            out = self.named(i)
            self.log.append(f"{out['loss'].item():.3f}")


class LeftByCaller(Loop):
    def use(self) -> None:
        for i in range(self.steps):
            number, _ = self.step(i)
            self.log.append(f"{number}")


def grads(loop: Loop) -> list[Tensor]:
    return [p.grad for p in loop.model.parameters() if p.grad is not None]


def logged(loop: Loop) -> None:
    loop.log.append(sum(float(grad.norm()) for grad in grads(loop)))


def returned(loop: Loop) -> Tensor:
    return torch.stack([grad.square().sum() for grad in grads(loop)]).sum().sqrt()


def true_norm(loop: Loop) -> None:
    scale = loop.scaler.get_scale()
    loop.log.append([float(grad.norm() / scale) for grad in grads(loop)])


def divided_and_clipped(loop: Loop) -> None:
    inverse = 1.0 / loop.scaler.get_scale()
    for grad in grads(loop):
        grad.mul_(inverse)
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        (Loop(logged, 41), "clip-before-unscale"),
        (Loop(logged, 41, every=7), "clip-before-unscale"),
        (ShownByCaller(returned, 41, every=7), "clip-before-unscale"),
        (ShownByCaller(returned, 0), "clip-before-unscale"),
        (InDictionary(returned, 0), "clip-before-unscale"),
        (Loop(divided_and_clipped, 27), "double-unscale"),
    ],
    ids=["in each", "now and then", "shown by the caller", "from the first", "by its name", "divided"],
)
def test_told_with_the_iteration_in_which_it_began(body: Loop, cause: str, guard: Guard) -> None:
    run = guard(body)
    assert run.faults == 0, run.stderr
    assert (run.causes, run.first.step) == ([cause], body.first)


@pytest.mark.parametrize(
    "body",
    [
        Loop(true_norm, 27),
        DividedByCaller(returned, 23, every=7),
        LeftByCaller(returned, 0),
        Loop(grads, 27),
        OtherOfDictionary(returned, 0),
    ],
    ids=["divided at once", "divided by the caller", "not used", "nothing computed", "another is used"],
)
def test_what_is_right_is_left_alone(body: Loop, guard: Guard) -> None:
    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.causes == []
