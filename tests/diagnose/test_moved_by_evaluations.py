"""Weights that a script moves by what it evaluates (zeroth order): the failure that has made them bad is told, and once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from watching import Watched

Guard = Callable[..., Watched]


def train(bad: int | None) -> Callable[[], None]:
    @torch.no_grad()
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

        def move(seed: int, by: float) -> None:
            generator = torch.Generator().manual_seed(seed)
            for p in model.parameters():
                p.data.add_(torch.randn(p.shape, generator=generator), alpha=by)

        for step in range(10):
            x, y = torch.randn(16, 4), torch.randint(0, 3, (16, 1))
            if step == bad:
                model[2].weight.mul_(400.0)
            losses = []
            for by in (1e-3, -2e-3):
                move(step, by)
                chances = model(x).softmax(-1).gather(1, y)
                losses.append(-chances.log().mean())
            move(step, 1e-3)
            move(step, -1e-3 * float(losses[0] - losses[1]) / 2e-3)

    return body


def test_the_loss_that_was_infinite(guard: Guard) -> None:
    run = guard(train(6))
    (incident,) = run.report.incidents
    assert incident.cause == "domain-error"
    assert incident.location is not None
    assert incident.location.code == "losses.append(-chances.log().mean())"
    assert incident.fixes[0].verified
    assert not run.faults


def test_a_healthy_loop(guard: Guard) -> None:
    assert guard(train(None)).report.status == "clean"


def test_another_model_that_is_bad_by_itself(guard: Guard) -> None:
    def body() -> None:
        train(6)()
        other = nn.Linear(3, 2)
        with torch.no_grad():
            other.weight[0, 0] = float("nan")
            other(torch.randn(4, 3)).sum().item()

    assert [i.cause for i in guard(body).report.incidents] == ["domain-error", "nonfinite-parameter"]
