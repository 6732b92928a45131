"""Parameters that were forgotten when the optimizer was built, and what a script leaves out of it on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
STEPS = 14


def train(
    held: Iterable[Tensor], loss_of: Callable[[Tensor], Tensor], after: Callable[[int, Any], None], scale: float
) -> None:
    opt = torch.optim.SGD(held, lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=max(scale, 1.0), enabled=scale > 0)
    for it in range(STEPS):
        with torch.autocast("cpu", dtype=torch.float16, enabled=scale > 0):
            loss = loss_of(torch.randn(16, 6))
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        after(it, opt)


def nothing(it: int, opt: Any) -> None: ...


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, out: Tensor) -> Tensor:
        return nn.functional.cross_entropy(
            out.float() * self.temperature.exp(), torch.zeros(len(out), dtype=torch.long)
        )


class Listed(nn.Module):
    def __init__(self, container: Callable[[list[nn.Module]], Any]) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.heads = container([nn.Linear(8, 2), nn.Linear(8, 2)])

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.body(x))
        return torch.stack([head(hidden) for head in self.heads]).float().pow(2).mean()


@pytest.mark.parametrize("scale", [0.0, 64.0])
def test_a_learned_temperature(scale: float, guard: Guard) -> None:
    torch.manual_seed(0)
    net, criterion = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)), Tempered()
    run = guard(lambda: train(net.parameters(), lambda x: criterion(net(x)), nothing, scale))
    (incident,) = run.report.incidents
    assert (incident.cause, incident.severity, incident.step) == ("stale-parameters", "warning", 0)
    assert incident.evidence["parameters"] == ["temperature"]
    assert incident.location.code.startswith("scaler.step(opt)")


def weights_of_tasks(net: nn.Module, log_vars: Tensor) -> Callable[[Tensor], Tensor]:
    def loss_of(x: Tensor) -> Tensor:
        losses = net(x).float().pow(2).mean(0)[:2]
        return ((-log_vars).exp() * losses + log_vars).sum()

    return loss_of


def test_weights_of_tasks_that_hang_in_no_module(guard: Guard) -> None:
    torch.manual_seed(0)
    net, log_vars = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)), nn.Parameter(torch.zeros(2))
    (incident,) = guard(
        lambda: train(net.parameters(), weights_of_tasks(net, log_vars), nothing, 64.0)
    ).report.incidents
    assert (incident.cause, incident.evidence["parameters"]) == ("stale-parameters", ["log_vars"])
    assert 'add_param_group({"params": [log_vars]})' in incident.fixes[0].how


@pytest.mark.parametrize("container", [list, tuple])
def test_layers_in_a_plain_list(container: Any, guard: Guard) -> None:
    torch.manual_seed(0)
    net = Listed(container)
    (incident,) = guard(lambda: train(net.parameters(), net, nothing, 64.0)).report.incidents
    assert (incident.cause, incident.evidence["hidden_in"]) == ("stale-parameters", ["heads"])
    assert "nn.ModuleList" in incident.fixes[0].how


def test_twin_that_holds_the_weights_of_tasks(guard: Guard) -> None:
    torch.manual_seed(0)
    net, log_vars = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)), nn.Parameter(torch.zeros(2))
    held = [*net.parameters(), log_vars]
    assert not guard(lambda: train(held, weights_of_tasks(net, log_vars), nothing, 64.0)).report.incidents


def test_twin_whose_layers_are_registered(guard: Guard) -> None:
    torch.manual_seed(0)
    net = Listed(nn.ModuleList)
    assert not guard(lambda: train(net.parameters(), net, nothing, 64.0)).report.incidents


def moved_by_hand(log_vars: Tensor) -> Callable[[int, Any], None]:
    def after(it: int, opt: Any) -> None:
        assert log_vars.grad is not None
        log_vars.data.add_(log_vars.grad.sign(), alpha=-1e-3)
        log_vars.grad = None

    return after


def moved_once(log_vars: Tensor) -> Callable[[int, Any], None]:
    """After the last step that is looked at."""

    def after(it: int, opt: Any) -> None:
        if it == STEPS - 2:
            log_vars.data.mul_(0.5).add_(0.1)

    return after


def joined_late(log_vars: Tensor) -> Callable[[int, Any], None]:
    def after(it: int, opt: Any) -> None:
        if it == 7:
            opt.add_param_group({"params": [log_vars]})

    return after


@pytest.mark.parametrize("then", [moved_by_hand, moved_once, joined_late])
def test_they_are_trained_otherwise(then: Any, guard: Guard) -> None:
    torch.manual_seed(0)
    net, log_vars = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)), nn.Parameter(torch.zeros(2))
    run = guard(lambda: train(net.parameters(), weights_of_tasks(net, log_vars), then(log_vars), 0.0))
    assert not run.report.incidents


def test_they_are_trained_by_a_later_optimizer(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net, temperature = nn.Linear(6, 8), nn.Parameter(torch.ones(()))
        opt = torch.optim.SGD(net.parameters(), lr=0.01)
        for it in range(30):
            if it == 20:
                opt = torch.optim.SGD([temperature], lr=0.01)
            loss = nn.functional.cross_entropy(net(torch.randn(16, 6)) / temperature, torch.zeros(16, dtype=torch.long))
            opt.zero_grad()
            loss.backward()
            opt.step()

    assert not guard(body).report.incidents


def test_a_backbone_and_a_measuring_network_that_are_left_out_on_purpose(guard: Guard) -> None:
    torch.manual_seed(0)
    backbone, head, measure = nn.Linear(6, 16), nn.Linear(16, 2), Listed(lambda heads: heads[:1])
    target = torch.randn(16, 6)

    def loss_of(x: Tensor) -> Tensor:
        out = head(torch.relu(backbone(x)))
        return out.float().pow(2).mean() + measure(torch.cat([out, target[:, :4]], 1))

    assert not guard(lambda: train(head.parameters(), loss_of, nothing, 64.0)).report.incidents


class Hidden(nn.Module):
    """One network in a list, so that it is no part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 6)
        self.measure = [nn.Linear(6, 4)]

    def forward(self, x: Tensor) -> Tensor:
        return (self.measure[0](self.net(x)) - self.measure[0](x * 2)).float().pow(2).mean()


def test_a_network_that_is_hidden_on_purpose(guard: Guard) -> None:
    torch.manual_seed(0)
    net = Hidden()
    assert not guard(lambda: train(net.parameters(), net, nothing, 64.0)).report.incidents
