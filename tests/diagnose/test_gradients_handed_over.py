"""Gradients of a worker's copy of a model, handed to the optimizer of the shared one: do they carry the loss scale there?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import clip_grad_norm_

Guard = Callable[..., Any]


def shared(hand: Callable[[torch.Tensor, float], torch.Tensor], finish: Callable[..., Any]) -> Callable[[], None]:
    def body() -> None:
        torch.manual_seed(0)
        owner, worker = (nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)) for _ in range(2))
        optimizer = torch.optim.RMSprop(owner.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
        for _ in range(10):
            worker.load_state_dict(owner.state_dict())
            worker.zero_grad()
            x = torch.randn(16, 6)
            with torch.autocast("cpu", dtype=torch.float16):
                out = worker(x)
            scaler.scale(F.mse_loss(out.float(), x[:, :2])).backward()
            for mine, theirs in zip(worker.parameters(), owner.parameters(), strict=True):
                assert mine.grad is not None
                theirs.grad = hand(mine.grad, scaler.get_scale())
            finish(optimizer, scaler, list(owner.parameters()))

    return body


def as_it_is(grad: torch.Tensor, scale: float) -> torch.Tensor:
    return grad


def divided(grad: torch.Tensor, scale: float) -> torch.Tensor:
    return grad / scale


def past(optimizer: Any, scaler: Any, parameters: Any) -> None:
    optimizer.step()


def through(optimizer: Any, scaler: Any, parameters: Any) -> None:
    scaler.step(optimizer)
    scaler.update()


def clipped(optimizer: Any, scaler: Any, parameters: Any) -> None:
    clip_grad_norm_(parameters, 1.0)
    through(optimizer, scaler, parameters)


BROKEN = {
    "stepped past the scaler": (shared(as_it_is, past), "bypassed-scaler", 4096.0, "optimizer.step()"),
    "clipped": (shared(as_it_is, clipped), "clip-before-unscale", 4096.0, "clip_grad_norm_(parameters, 1.0)"),
    "divided twice": (shared(divided, through), "double-unscale", 1 / 4096, "scaler.step(optimizer)"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_with_them_is_told(guard: Guard, name: str) -> None:
    body, cause, factor, code = BROKEN[name]
    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.causes == [cause]
    assert (run.first.step, run.first.evidence["factor"], run.first.location.code) == (0, factor, code)


RIGHT = {
    "divided, stepped past the scaler": shared(divided, past),
    "stepped by the scaler": shared(as_it_is, through),
    "copied, stepped by the scaler": shared(lambda grad, scale: grad.clone(), through),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_silent(guard: Guard, name: str) -> None:
    run = guard(RIGHT[name])
    assert run.faults == 0, run.stderr
    assert run.causes == []


def first_order(has_inner_optimizer: bool, finish: Callable[..., Any]) -> Callable[[], None]:
    """MAML without second derivatives: the sum of what adapted copies give."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 1))
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(8):
            optimizer.zero_grad()
            for p in net.parameters():
                p.grad = torch.zeros_like(p)
            for _ in range(2):
                fast = copy.deepcopy(net)
                inner = torch.optim.SGD(fast.parameters(), lr=0.01) if has_inner_optimizer else None
                x = torch.randn(16, 2)
                for is_last in (False, True):
                    with torch.autocast("cpu", dtype=torch.float16):
                        out = fast(x)
                    loss = F.mse_loss(out.float(), x[:, :1].sin())
                    fast.zero_grad()
                    if is_last:
                        scaler.scale(loss).backward()
                    elif inner is not None:
                        loss.backward()
                        inner.step()
                    else:
                        found = torch.autograd.grad(loss, list(fast.parameters()))
                        with torch.no_grad():
                            for p, grad in zip(fast.parameters(), found, strict=True):
                                p -= 0.01 * grad
                for p, q in zip(net.parameters(), fast.parameters(), strict=True):
                    assert p.grad is not None
                    assert q.grad is not None
                    p.grad += q.grad / 2
            finish(optimizer, scaler, list(net.parameters()))

    return body


@pytest.mark.parametrize("has_inner_optimizer", [False, True])
def test_sum_of_what_copies_give(guard: Guard, has_inner_optimizer: bool) -> None:
    run = guard(first_order(has_inner_optimizer, past))
    assert run.faults == 0, run.stderr
    assert run.causes == ["bypassed-scaler"]
    assert (run.first.evidence["factor"], run.first.location.code) == (1024.0, "optimizer.step()")


def unscaled_and_clipped(optimizer: Any, scaler: Any, parameters: Any) -> None:
    scaler.unscale_(optimizer)
    clipped(optimizer, scaler, parameters)


@pytest.mark.parametrize("finish", [through, unscaled_and_clipped])
@pytest.mark.parametrize("has_inner_optimizer", [False, True])
def test_sum_of_what_copies_give_through_the_scaler(guard: Guard, has_inner_optimizer: bool, finish: Any) -> None:
    run = guard(first_order(has_inner_optimizer, finish))
    assert run.faults == 0, run.stderr
    assert run.causes == []
