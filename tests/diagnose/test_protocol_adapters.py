"""Adapters that are put around frozen layers: does anybody train them?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


class LowRank(nn.Module):
    """A frozen linear layer, and a trained product of two small matrices beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def tune(order: str, trains_head: bool, by_hand: bool = False, scales: bool = False) -> Callable[[], None]:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        model[2].requires_grad_(trains_head)
        model[0] = LowRank(model[0])
        added = [model[0].down, model[0].up]
        if order == "wrapped first":
            opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        if order == "a group added":
            opt.add_param_group({"params": added})
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scales)
        for _ in range(6):
            with torch.autocast("cpu", dtype=torch.float16, enabled=scales):
                loss = model(torch.randn(16, 6)).float().pow(2).mean()
            model.zero_grad()
            scaler.scale(loss).backward()
            try:
                scaler.step(opt)
            except AssertionError:  # "No inf checks were recorded for this optimizer."
                return
            scaler.update()
            if by_hand:
                with torch.no_grad():
                    for p in added:
                        p -= 0.05 * p.grad

    return body


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("trains_head", [False, True])
def test_an_adapter_that_came_after_the_optimizer(trains_head: bool, scales: bool, guard: Guard) -> None:
    run = guard(tune("optimizer first", trains_head, scales=scales))

    assert run.faults == 0, run.stderr
    (incident,) = [i for i in run.report.incidents if i.severity != "info"]
    assert (incident.cause, incident.severity, incident.step) == ("stale-parameters", "error", 0)
    assert "`0.down`, `0.up` get gradients and belong to no optimizer, while 2 of its 4 tensors" in incident.explanation
    assert incident.fixes[0].action == "rebuild-optimizer"
    assert "after the layers have been wrapped" in incident.fixes[0].how


@pytest.mark.parametrize("trains_head", [False, True])
@pytest.mark.parametrize("order", ["wrapped first", "a group added"])
def test_an_adapter_that_is_trained(order: str, trains_head: bool, guard: Guard) -> None:
    run = guard(tune(order, trains_head))

    assert (run.faults, run.causes) == (0, []), run.stderr


def test_an_adapter_that_the_script_updates_itself(guard: Guard) -> None:
    run = guard(tune("optimizer first", trains_head=True, by_hand=True))

    assert (run.faults, run.causes) == (0, []), run.stderr


def test_frozen_parameters_are_called_so_without_a_scaler(guard: Guard) -> None:
    def body() -> None:
        body_net, head = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2)
        opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (body_net, head)]
        for _ in range(6):
            loss = head(body_net(torch.randn(8, 4))).pow(2).mean()
            for opt in opts:
                opt.zero_grad()
            loss.backward()
            for opt in opts:
                opt.step()

    run = guard(body)

    assert run.causes == ["no-gradients"], run.stderr
    assert "all have requires_grad=False" in run.first.explanation


class OfLayers(nn.Module):
    """The same, with layers of its own beside the frozen one."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("joins", [False, True])
def test_an_adapter_of_layers(joins: bool, guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        model[0] = adapter = OfLayers(model[0])
        if joins:
            opt.add_param_group({"params": [adapter.down.weight, adapter.up.weight]})
        for _ in range(6):
            model.zero_grad()
            model(torch.randn(16, 6)).pow(2).mean().backward()
            opt.step()

    run = guard(body)

    assert run.faults == 0, run.stderr
    if joins:
        assert run.report.incidents == ()
        return
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step, incident.module) == ("stale-parameters", 0, "0")
    assert "`0.down.weight`, `0.up.weight` get gradients" in incident.explanation
    assert "while 2 of its 4 tensors lie frozen" in incident.explanation
