"""What a derivative is taken for, in every form that PyTorch takes: a step is replayed with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from ampguard.capture.glue import schedule

BAD = 3


def by_iterator(loss: Tensor, net: nn.Module) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, net.parameters(), create_graph=True)  # type: ignore[arg-type]


def by_keyword(loss: Tensor, net: nn.Module) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs=net.parameters(), create_graph=True)  # type: ignore[arg-type]


def by_values(loss: Tensor, net: nn.Module) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, dict(net.named_parameters()).values(), create_graph=True)  # type: ignore[arg-type]


def by_list(loss: Tensor, net: nn.Module) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, list(net.parameters()), create_graph=True)


def by_name(loss: Tensor, net: nn.Module) -> tuple[Tensor, ...]:
    named = dict(net.named_parameters())
    try:
        found: Any = torch.autograd.grad(loss, named, create_graph=True)  # type: ignore[arg-type]
    except (TypeError, AttributeError, RuntimeError):
        pytest.skip("this PyTorch takes no dictionary")
    return tuple(found.values())


def learn_to_learn(derive: Callable[[Tensor, nn.Module], tuple[Tensor, ...]]) -> list[float]:
    """One step of gradient descent in the loss (MAML); of one task the spread is 0."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    losses = []
    for step in range(6):
        x = torch.randn(5, 3)
        y = x.sum(1, keepdim=True)
        spread = y.std() * (step != BAD)
        gradients = derive((net(x) - y).square().mean(), net)
        fast = {name: p - 0.1 * g for (name, p), g in zip(net.named_parameters(), gradients, strict=True)}
        wrong = functional_call(net, fast, (x,)) - y
        loss = (wrong / spread).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("derive", [by_iterator, by_keyword, by_values, by_list, by_name])
def test_a_step_with_a_derivative_inside(
    guard: Callable[..., Any], derive: Callable[[Tensor, nn.Module], tuple[Tensor, ...]]
) -> None:
    plain = learn_to_learn(derive)
    run = guard(lambda: learn_to_learn(derive))
    assert run.faults == 0, run.stderr
    assert run.result[:BAD] == plain[:BAD]
    assert (run.first.cause, run.first.step) == ("division-by-zero", BAD)
    assert run.first.location.code == "loss = (wrong / spread).square().mean()"
    assert run.first.evidence["rung"] == "replay"
    assert run.first.fixes[0].verified


def test_backward_into_an_iterator_of_parameters(guard: Callable[..., Any]) -> None:
    def body() -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
        for step in range(6):
            x = torch.randn(5, 3) * (step != BAD)
            loss = (net(x) - net.bias).square().sum().sqrt()
            optimizer.zero_grad()
            torch.autograd.backward(loss, inputs=net.parameters())  # type: ignore[arg-type]
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    plain = body()
    run = guard(body)
    assert run.faults == 0, run.stderr
    torch.testing.assert_close(run.result, plain, rtol=0, atol=0, equal_nan=True)
    assert (run.first.cause, run.first.step, run.first.phase) == ("singular-gradient", BAD, "backward")
    assert run.first.evidence["rung"] == "replay"


def interior(net: nn.Module, points: Tensor) -> Tensor:
    """The Laplacian in a cylinder: coordinates are split, differentiated by, and only joined before the network."""
    r, z = (c.clone().requires_grad_(True) for c in points.split(1, dim=1))
    u = net(torch.cat([r, z], 1))
    u_r, u_z = torch.autograd.grad(u.sum(), (r, z), create_graph=True)
    return torch.autograd.grad(u_r.sum(), r, create_graph=True)[0] + u_r / r + u_z


def held(net: nn.Module, points: Tensor) -> Tensor:
    """The same by the batch itself."""
    points = points.requires_grad_()
    u = net(torch.cat([points[:, 1:], points[:, :1]], 1))
    first = torch.autograd.grad(u.sum(), points, create_graph=True)[0]
    return first[:, :1] / points[:, :1]


@pytest.mark.parametrize("residual", [interior, held])
def test_what_is_joined_before_the_network_late_in_a_run(
    guard: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, residual: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    monkeypatch.setattr(schedule, "FIRST_PREFIXES", 0)  # what is only moved is not taped for long
    monkeypatch.setattr(schedule, "PREFIX_TIME_SHARE", 0.0)
    late = 3 * schedule.EMPTY_PREFIXES

    def body() -> list[float]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        clouds = [torch.rand(16, 2) + 0.1 for _ in range(late + 2)]
        clouds[late][3, 0] = 0.0
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        losses = []
        for points in clouds:
            loss = residual(net, points).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    plain = body()
    run = guard(body)
    assert run.faults == 0, run.stderr
    torch.testing.assert_close(run.result, plain, rtol=0, atol=0, equal_nan=True)
    assert (run.first.cause, run.first.step) == ("division-by-zero", late)
    assert " / " in run.first.location.code
    assert run.first.evidence["rung"] == "replay"
    assert run.first.fixes[0].verified


@pytest.mark.parametrize("clears", [True, False])
def test_a_penalty_on_a_batch_that_is_written_to_first(clears: bool, guard: Callable[..., Any]) -> None:
    """WGAN-GP's: the batch wants a gradient only behind what is written to it in place."""

    def train() -> list[float]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(net.parameters())
        losses = []
        for step in range(6):
            x = torch.randn(16, 8)
            if clears or step == BAD:
                x[x > 1.5] = 0.0
            if step == BAD:
                x[3, 2] = float("nan")
            x.requires_grad_()
            out = net(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = out.square().mean() + (slope.norm(dim=1) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            losses.append(loss.item())
            if loss.isfinite():
                optimizer.step()
        return losses

    run = guard(train)
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.step) == ("nonfinite-input", BAD)
    assert run.first.evidence["samples"] == [3]
    assert {fix.action for fix in run.first.fixes if fix.verified} == {"filter-sample", "fix-data"}
