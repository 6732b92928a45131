"""What `torch.jit.script` has made of a part of the loss is called past every function mode, and recorded all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import fingerprint, seed_everything

from ampguard import compat

Guard = Callable[..., Any]

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*")


def surprisal(x: Tensor, weight: float = 1.0) -> Tensor:
    return -torch.log(x) * weight


def noisy(x: Tensor) -> Tensor:
    return torch.log(x) + torch.rand_like(x)


def in_place(x: Tensor) -> Tensor:
    return (x * 1.0).log_()


def train(function: Callable[..., Tensor], falls_to: float) -> dict[str, Any]:
    seed_everything()
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    for step in range(8):
        x = net(torch.randn(6, 4)) + (0.5 if step < 6 else falls_to)
        loss = function(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return fingerprint(net, optimizer)


@pytest.mark.parametrize("function", [surprisal, noisy, in_place])
def test_it_is_seen_and_changed_by_nothing(guard: Guard, function: Callable[..., Tensor]) -> None:
    run = guard(lambda: train(torch.jit.script(function), 0.0))
    assert run.faults == 0, run.stderr
    assert run.result == train(torch.jit.script(function), 0.0)
    assert (run.first.cause, run.first.step) == ("domain-error", 6)
    assert run.first.location is not None
    assert run.first.location.code == "loss = function(x).mean()"
    clamping = next(fix for fix in run.first.fixes if fix.action == "clamp")
    assert clamping.verified
    if function is surprisal:
        assert "its gradients too" in clamping.outcome


def test_a_healthy_one_is_left_alone(guard: Guard) -> None:
    run = guard(lambda: train(torch.jit.script(surprisal), 0.5))
    assert run.faults == 0, run.stderr
    assert run.result == train(torch.jit.script(surprisal), 0.5)
    assert run.report.incidents == ()


@pytest.mark.parametrize(("function", "is_pure"), [(surprisal, True), (noisy, False), (in_place, False)])
def test_which_only_compute(function: Callable[..., Tensor], is_pure: bool) -> None:
    assert compat.only_computes(torch.jit.script(function)) is is_pure


def test_operator_by_operator_gives_the_same_gradients() -> None:
    function = torch.jit.script(surprisal)
    x = torch.rand(5, requires_grad=True)
    for _ in range(3):  # its executor has optimised it by then
        (expected,) = torch.autograd.grad(function(x, weight=3.0).sum(), x)
    (found,) = torch.autograd.grad(compat.operator_by_operator(function)(x, weight=3.0).sum(), x)
    assert torch.equal(found, expected)
