"""A line with several expressions that run one operator, run for each micro-batch of a window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


def adversarial(real: Tensor, fake: Tensor) -> Tensor:
    return -(torch.log(real) + torch.log(1 - fake)).mean()


def test_the_accused_one_is_told_from_the_others(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        for step in range(3):
            optimizer.zero_grad()
            for part in range(3):
                fake = torch.randn(6, 4)
                if (step, part) == (2, 1):
                    fake = fake + 60 * net[0].weight.detach().sign()
                loss = adversarial(net(torch.randn(6, 4)), net(fake))
                (loss / 3).backward()
            optimizer.step()

    first = guard(body).first
    assert (first.cause, first.step, first.op) == ("domain-error", 2, "aten.log.default")
    hows = {fix.action: fix.how for fix in first.fixes}
    assert hows["stable-form"] == (
        "torch.nn.functional.logsigmoid(-x) in place of: torch.log(1 - fake)\n# x is what sigmoid is given"
    )
    assert hows["clamp"] == "return -(torch.log(real) + torch.log((1 - fake).clamp(min=1e-6))).mean()"
    assert not [fix for fix in first.fixes if not fix.verified]


def test_all_are_changed_where_the_others_fail_as_well(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(4, 4, bias=False)
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        for step in range(3):
            x = torch.randn(6, 4) * (0 if step == 2 else 1)
            a, b = net(x).abs(), x.abs()
            loss = nn.functional.l1_loss(a.log(), b.log())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    first = guard(body).first
    assert (first.cause, first.step, first.op) == ("domain-error", 2, "aten.log.default")
    fix = first.fixes[0]
    assert (fix.action, fix.verified) == ("clamp", True)
    assert fix.how == "loss = nn.functional.l1_loss(a.clamp(min=1e-6).log(), b.clamp(min=1e-6).log())"
