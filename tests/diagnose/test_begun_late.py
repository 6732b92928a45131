"""What a script begins to do wrong in the middle of a run, or does in some iterations only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Guard = Callable[..., Any]
SCALE = 2048.0


class Loop:
    """Clears the gradients first, as most loops do."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

    def losses(self) -> tuple[Tensor, Tensor]:
        x = torch.randn(16, 6)
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.model(x).float()
        return F.mse_loss(out[:, 0], x.sum(1)), F.mse_loss(out[:, 1], x[:, 0])

    def run(self, steps: int, between: Callable[[int], None]) -> None:
        for step in range(steps):
            self.optimizer.zero_grad()
            self.scaler.scale(sum(self.losses())).backward()
            between(step)
            self.scaler.step(self.optimizer)
            self.scaler.update()


@pytest.mark.parametrize("since", [5, 21, 32])
def test_gradients_that_are_clipped_by_hand_from_some_step_on(guard: Guard, since: int) -> None:
    def body() -> None:
        loop = Loop()

        def clip(step: int) -> None:
            for p in loop.parameters if step >= since else ():
                assert p.grad is not None
                norm = p.grad.detach().norm()
                limit = p.detach().norm().clamp(min=1e-3) * 0.02
                p.grad.detach().copy_(torch.where(norm > limit, p.grad * (limit / norm), p.grad))

        loop.run(36, clip)

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.causes == ["clip-before-unscale"]
    assert run.first.step == since


@pytest.mark.parametrize("late", [0, 1])
def test_gradients_that_are_divided_in_iterations_that_log(guard: Guard, late: int) -> None:
    def body() -> None:
        loop = Loop()

        def log(step: int) -> None:
            if step and (step + late) % 50 == 0:
                for p in loop.parameters:
                    assert p.grad is not None
                    p.grad.data.div_(loop.scaler.get_scale())

        loop.run(54, log)

    run = guard(body)
    assert run.causes == ["double-unscale"]
    assert run.first.step == 50 - late
    assert run.first.evidence["factor"] == 1 / SCALE


def test_gradients_that_a_mask_is_put_on_now_and_then(guard: Guard) -> None:
    def body() -> None:
        loop = Loop()

        def prune(step: int) -> None:
            for p in loop.parameters if step >= 12 and step % 3 else ():
                assert p.grad is not None
                p.grad.mul_(p.detach().abs() > 0.1)

        loop.run(40, prune)

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.causes == []


@pytest.mark.parametrize("clears", [False, True])
def test_a_region_of_autocast_that_begins_late_and_is_never_left(guard: Guard, clears: bool) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        region = torch.autocast("cpu", dtype=torch.bfloat16)
        for step in range(30):
            if step == 20:
                region.__enter__()
            optimizer.zero_grad()
            model(torch.randn(4, 8)).float().square().mean().backward()
            optimizer.step()
            if clears:
                torch.clear_autocast_cache()
        region.__exit__(None, None, None)

    run = guard(body)
    assert run.faults == 0, run.stderr
    if clears:
        assert run.causes == []
        return
    assert run.causes == ["autocast-cache"]
    assert run.first.step == 21
    assert run.first.location.code == "region.__enter__()"


def surgery(factor: float, is_scaled: bool, projects: bool = False, since: int = 12) -> Callable[[], None]:
    """From `since` on a second loss has a gradient of its own, which is added with a factor."""

    def body() -> None:
        loop = Loop()
        for step in range(30):
            first, second = loop.losses()
            whole = torch.autograd.grad(loop.scaler.scale(first), loop.parameters, retain_graph=True)
            parts = [g.clone() for g in whole]
            if step >= since:
                other = loop.scaler.scale(second) if is_scaled else second
                for mine, theirs in zip(parts, torch.autograd.grad(other, loop.parameters), strict=True):
                    if projects and (dot := (mine * theirs).sum()) < 0:
                        mine -= dot / theirs.square().sum() * theirs
                    mine += factor * theirs
            for p, g in zip(loop.parameters, parts, strict=True):
                p.grad = g
            loop.scaler.step(loop.optimizer)
            loop.scaler.update()

    return body


@pytest.mark.parametrize("projects", [False, True])
def test_a_second_gradient_without_the_scale(guard: Guard, projects: bool) -> None:
    run = guard(surgery(1.0, is_scaled=False, projects=projects))
    assert run.faults == 0, run.stderr
    assert run.causes == ["unscaled-backward"]
    assert run.first.step == 12
    assert run.first.evidence["factor"] == 1 / SCALE
    assert "torch.autograd.grad(other" in run.first.location.code


@pytest.mark.parametrize(("factor", "is_scaled"), [(1.0, True), (0.5, True), (SCALE, False)])
def test_a_second_gradient_with_the_scale(guard: Guard, factor: float, is_scaled: bool) -> None:
    assert guard(surgery(factor, is_scaled)).causes == []


def test_a_weight_made_of_plain_gradients(guard: Guard) -> None:
    """As in VQGAN: what a loss counts for is a ratio of two norms of gradients that nobody steps with."""

    def body() -> None:
        loop = Loop()
        last = loop.model[2].weight
        for step in range(24):
            loop.optimizer.zero_grad()
            first, second = loop.losses()
            weight = 1.0
            if step >= 10:
                norms = [torch.autograd.grad(loss, last, retain_graph=True)[0].norm() for loss in (first, second)]
                weight = (norms[0] / (norms[1] + 1e-4)).clamp(0, 10).detach()
            loop.scaler.scale(first + weight * second).backward()
            loop.scaler.step(loop.optimizer)
            loop.scaler.update()

    assert guard(body).causes == []
