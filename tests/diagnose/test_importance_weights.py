"""What is made of scaled gradients and kept until it is part of a loss: importance weights, and weights of a second loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Guard = Callable[..., Any]
Kept = dict[str, Tensor]
SCALE = 4096.0
STEPS = 14


class Task:
    """A small classifier, and the loop of one task after the other."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.02, momentum=0.9)
        self.scaler: Any = torch.amp.GradScaler("cpu", init_scale=SCALE)

    def loss(self, column: int = 0) -> Tensor:
        x = torch.randn(16, 8)
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.net(x)
        return F.cross_entropy(out.float(), (x[:, column] > 0).long())

    def step(self, loss: Tensor, look: Callable[[], None] = lambda: None) -> None:
        self.opt.zero_grad()
        self.scaler.scale(loss).backward()
        look()
        self.scaler.step(self.opt)
        self.scaler.update()

    def grads(self) -> list[tuple[str, Tensor]]:
        return [(name, p.grad) for name, p in self.net.named_parameters() if p.grad is not None]

    def zeros(self) -> Kept:
        return {name: torch.zeros_like(p) for name, p in self.net.named_parameters()}

    def consolidate(self, weights: Kept, strength: float = 2.0) -> None:
        """Train the next task, held at the weights of the last one."""
        before = {name: p.detach().clone() for name, p in self.net.named_parameters()}
        for _ in range(6):
            moved = [(weights[name] * (p - before[name]).square()).sum() for name, p in self.net.named_parameters()]
            self.step(self.loss(4) + strength * torch.stack(moved).sum())


def add_squares(task: Task, kept: Kept) -> None:
    for name, g in task.grads():
        kept[name] += g.detach() ** 2 / 4


def add_products(task: Task, kept: Kept) -> None:
    for name, g in task.grads():
        kept[name].addcmul_(g, g, value=0.25)


def add_anew(task: Task, kept: Kept) -> None:
    for name, g in task.grads():
        kept[name] = kept[name] + g.data.clone().square()


def add_true_squares(task: Task, kept: Kept) -> None:
    inverse = 1.0 / task.scaler.get_scale()
    for name, g in task.grads():
        kept[name] += (g * inverse).square()


Keep = Callable[[Task, Kept], None]
Finish = Callable[[Task, Kept], Kept]


def estimated(keep: Keep, finish: Finish = lambda task, kept: kept, scales: bool = True) -> Callable[[], None]:
    """Between the tasks, in some passes without a step."""

    def body() -> None:
        task = Task()
        for _ in range(STEPS):
            task.step(task.loss())
        kept = task.zeros()
        for _ in range(4):
            task.net.zero_grad()
            loss = task.loss()
            (task.scaler.scale(loss) if scales else loss).backward()
            keep(task, kept)
        kept = finish(task, kept)
        task.consolidate(kept)

    return body


def averaged(finish: Finish = lambda task, kept: kept, unscales: bool = False) -> Callable[[], None]:
    """While the first task is trained, before each step."""

    def body() -> None:
        task = Task()
        kept = task.zeros()

        def look() -> None:
            if unscales:
                task.scaler.unscale_(task.opt)
            for name, g in task.grads():
                kept[name].mul_(0.9).add_(g.square(), alpha=0.1)

        for _ in range(STEPS):
            task.step(task.loss(), look)
        task.consolidate(finish(task, kept))

    return body


def taken(scales: bool) -> Callable[[], None]:
    """Memory-aware synapses: by `torch.autograd.grad`, of the length of the output."""

    def body() -> None:
        task = Task()
        for _ in range(STEPS):
            task.step(task.loss())
        kept = task.zeros()
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.float16):
                out = task.net(torch.randn(16, 8))
            length = out.float().square().sum(1).mean()
            found = torch.autograd.grad(task.scaler.scale(length) if scales else length, list(task.net.parameters()))
            for name, g in zip(kept, found, strict=True):
                kept[name] += g.abs() / 3
        task.consolidate(kept)

    return body


def divided_by_batches(task: Task, kept: Kept) -> Kept:
    return {name: value / 4 for name, value in kept.items()}


BROKEN = {
    "squares": (estimated(add_squares), 2.0, "add_squares"),
    "products": (estimated(add_products), 2.0, "add_products"),
    "new tensors": (estimated(add_anew), 2.0, "add_anew"),
    "a mean of new tensors": (estimated(add_anew, divided_by_batches), 2.0, "add_anew"),
    "averaged as it trains": (averaged(), 2.0, "look"),
    "by autograd.grad": (taken(scales=True), 1.0, "body"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_carries_the_scale_into_a_loss_is_told(guard: Guard, name: str) -> None:
    body, power, function = BROKEN[name]
    run = guard(body)
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.severity, run.first.step) == ("clip-before-unscale", "error", STEPS)
    assert (run.first.evidence["power"], run.first.evidence["factor"]) == (power, SCALE**power)
    assert run.first.location.function == function
    assert "became part of a loss" in run.first.explanation


def over_scale(task: Task, kept: Kept) -> Kept:
    return {name: value / task.scaler.get_scale() ** 2 for name, value in kept.items()}


def over_scale_in_place(task: Task, kept: Kept) -> Kept:
    for value in kept.values():
        value.div_(4).div_(task.scaler.get_scale() ** 2)
    return kept


def over_largest(task: Task, kept: Kept) -> Kept:
    largest = max(float(value.max()) for value in kept.values())
    for value in kept.values():
        value /= largest
    return kept


def over_largest_anew(task: Task, kept: Kept) -> Kept:
    largest = torch.stack([value.max() for value in kept.values()]).max()
    return {name: value / largest for name, value in kept.items()}


def over_mean(task: Task, kept: Kept) -> Kept:
    for value in kept.values():
        value.div_(value.mean())
    return kept


def over_spread(task: Task, kept: Kept) -> Kept:
    for value in kept.values():
        value.div_(value.std() + value.mean())
    return kept


def above_median(task: Task, kept: Kept) -> Kept:
    for value in kept.values():
        value.copy_((value > value.median()).float())
    return kept


RIGHT = {
    "of a loss that is not scaled": estimated(add_squares, scales=False),
    "of divided gradients": estimated(add_true_squares),
    "divided by the square of the scale": estimated(add_squares, over_scale),
    "divided in place": estimated(add_squares, over_scale_in_place),
    "by the largest": estimated(add_squares, over_largest),
    "by the largest, anew": estimated(add_squares, over_largest_anew),
    "unscaled, averaged": averaged(unscales=True),
    "averaged, by the largest": averaged(over_largest),
    "averaged, by the mean": averaged(over_mean),
    "averaged, by mean and deviation": averaged(over_spread),
    "averaged, above the median": averaged(above_median),
    "averaged, divided in place": averaged(over_scale_in_place),
    "by autograd.grad": taken(scales=False),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_carries_no_scale_is_not(guard: Guard, name: str) -> None:
    run = guard(RIGHT[name])
    assert run.faults == 0, run.stderr
    assert run.causes == []


def with_strength(of: Callable[[Task, Kept], float]) -> Callable[[], None]:
    def body() -> None:
        task = Task()
        for _ in range(STEPS):
            task.step(task.loss())
        kept = task.zeros()
        strength = of(task, kept)
        for _ in range(4):
            task.net.zero_grad()
            task.scaler.scale(task.loss()).backward()
            add_squares(task, kept)
        task.consolidate(kept, strength or 1.0 / float(sum(value.sum() for value in kept.values())))

    return body


@pytest.mark.parametrize("of", [lambda task, kept: 2.0 / SCALE**2, lambda task, kept: 0.0], ids=["scale", "sum"])
def test_what_a_factor_takes_out_is_not(guard: Guard, of: Any) -> None:
    run = guard(with_strength(of))
    assert run.faults == 0, run.stderr
    assert run.causes == []


def balanced(scales: tuple[bool, bool]) -> Callable[[], None]:
    """The weight of a second loss from the gradients of both at a layer (VQGAN)."""

    def body() -> None:
        task = Task()
        for _ in range(6):
            losses = task.loss(), 5.0 * task.loss(4)
            last = next(task.net.parameters())
            one, other = (
                torch.autograd.grad(task.scaler.scale(loss) if is_scaled else loss, last, retain_graph=True)[0]
                for loss, is_scaled in zip(losses, scales, strict=True)
            )
            weight = (one.norm() / (other.norm() + 1e-4)).clamp(0, 1e4).detach()
            task.step(losses[0] + weight * losses[1])

    return body


def test_a_weight_from_a_scaled_and_an_unscaled_gradient(guard: Guard) -> None:
    run = guard(balanced((True, False)))
    assert run.faults == 0, run.stderr
    assert run.first.cause == "clip-before-unscale"
    assert (run.first.step, run.first.evidence["factor"]) == (0, SCALE)
    assert "weight = " in run.first.location.code


@pytest.mark.parametrize("scales", [(True, True), (False, False)])
def test_a_weight_from_gradients_of_one_kind(guard: Guard, scales: tuple[bool, bool]) -> None:
    run = guard(balanced(scales))
    assert run.faults == 0, run.stderr
    assert run.causes == []
