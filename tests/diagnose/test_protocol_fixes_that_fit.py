"""What is printed to be written must fit the loop that it is printed for: who shares a scaler, and what the scaler steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]


def loss_of(model: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return model(torch.randn(8, 4)).float().square().mean()


@pytest.mark.parametrize("shares", [True, False])
def test_a_window_beside_an_optimizer_that_steps_each_time(shares: bool, guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        slow, fast = nn.Linear(4, 4), nn.Linear(4, 4)
        opt_slow, opt_fast = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (slow, fast))
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=6)
        scaler_2 = scaler if shares else torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        for i in range(12):
            opt_fast.zero_grad()
            scaler.scale(loss_of(fast)).backward()
            scaler.step(opt_fast)
            scaler_2.scale(loss_of(slow) / 4).backward()
            if i % 4 == 3:
                scaler_2.step(opt_slow)
                opt_slow.zero_grad()
                if not shares:
                    scaler_2.update()
            scaler.update()

    incidents = guard(body).report.incidents
    if not shares:
        assert not incidents
        return
    (incident,) = incidents
    assert (incident.cause, incident.evidence["scales"]) == ("accumulation-broken", [256.0, 512.0])
    assert "`opt_fast` steps in every micro-step, with the same scaler" in incident.explanation
    assert incident.fixes[0].how.startswith("give `opt_slow` a GradScaler of its own")


class Around:
    """A wrapper around an optimizer, as Lookahead: the scheduler moves the inner one, the scaler steps the outer one."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups, self.state = base, base.param_groups, base.state

    def step(self) -> None:
        self.base.step()


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_schedule_of_the_optimizer_inside_a_wrapper(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        opt = Around(torch.optim.SGD(model.parameters(), lr=0.01))
        schedule = torch.optim.lr_scheduler.LinearLR(opt.base, total_iters=50)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
        for _ in range(12):
            opt.base.zero_grad()
            scaler.scale(loss_of(model)).backward()
            scaler.step(opt)
            scaler.update()
            schedule.step()

    (incident,) = [i for i in guard(body).report.incidents if i.phase == "protocol"]
    assert incident.cause == "scheduler-on-skipped-step"
    assert "scaler.step(opt); scaler.update(); if" in incident.fixes[0].how


def test_a_loss_behind_another_statement_of_its_line(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
        for _ in range(6):
            opt.zero_grad()
            scaler.scale(loss_of(model)).backward()
            decay = model.weight.square().sum(); decay.backward()  # fmt: skip # noqa: E702
            scaler.step(opt)
            scaler.update()

    (incident,) = guard(body).report.incidents
    assert incident.cause == "unscaled-backward"
    assert "scaler.scale(decay).backward()" in incident.fixes[0].how
    assert "square" not in incident.fixes[0].how
