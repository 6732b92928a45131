"""Gradients that are flushed to zero from some step on that is no power of two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ampguard.capture.sampling import weights

Guard = Callable[..., Any]


def train(late_weight: float) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 8))
    opt = torch.optim.SGD(net.parameters(), lr=1e-3)
    for step in range(30):
        with torch.autocast("cpu", dtype=torch.float16):
            out = net(torch.randn(64, 8))
        loss = (out.float() - 1).square().mean() * (1.0 if step < 19 else late_weight)
        opt.zero_grad()
        loss.backward()
        opt.step()


@pytest.mark.parametrize(("late_weight", "causes"), [(1e-6, ["gradient-underflow"]), (0.5, [])])
def test_told_when_it_begins(
    late_weight: float, causes: list[str], guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "SHARE", 1.0)  # each step is looked at
    run = guard(lambda: train(late_weight))
    assert run.faults == 0, run.stderr
    assert (run.causes, [i.step for i in run.report.incidents]) == (causes, [19] * len(causes))


def test_an_optimizer_that_comes_late_is_looked_at_from_its_first_step(guard: Guard) -> None:
    """A student behind its teacher, whose loss is divided by more than the usual loss scales can make up for."""

    def body() -> None:
        torch.manual_seed(0)
        teacher = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 8))
        opt = torch.optim.Adam(teacher.parameters(), lr=1e-2)
        for _ in range(21):
            opt.zero_grad()
            ((teacher(torch.randn(64, 8)) - 1).square().mean() * 1e-3).backward()
            opt.step()
        student = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 8))
        opt = torch.optim.SGD(student.parameters(), lr=1e-3)
        for _ in range(12):
            x = torch.randn(16384, 8)
            with torch.no_grad():
                wanted = teacher(x)
            with torch.autocast("cpu", dtype=torch.float16):
                out = student(x)
            loss = (out.float() - wanted).square().mean() * 2.0**-28
            opt.zero_grad()
            loss.backward()
            opt.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert (run.causes, run.first.step) == (["gradient-underflow"], 21)
    fixes = {fix.action: fix for fix in run.first.fixes}
    assert fixes["raise-loss-scale"].verified
    assert run.first.evidence["saving_scale"] > 2.0**16
    assert fixes["use-bf16"].verified


def test_all_but_the_last_layer_from_the_first_step_on(guard: Guard) -> None:
    """The last one's gradients are sums over many positions, and not lost: what lies before it has nothing but zeros."""

    def body() -> None:
        torch.manual_seed(0)
        body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        head = nn.Conv2d(8, 4, 1)
        nn.init.normal_(head.weight, std=1e-5)
        opt = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=1e-4)
        for _ in range(12):
            x, heat = torch.rand(16, 1, 48, 48), torch.rand(16, 4, 48, 48)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.mse_loss(head(body(x)), heat)
            opt.zero_grad()
            loss.backward()
            opt.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert (run.causes, run.first.step) == (["gradient-underflow"], 0), run.stderr
