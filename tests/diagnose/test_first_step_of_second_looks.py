"""What only a second look is sure of is told as of the step in which it happened first."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from watching import Watched, seed_everything

Guard = Callable[..., Watched]


def steps_of(run: Watched) -> dict[str, int]:
    return {incident.cause: incident.step for incident in run.report.incidents}


def test_a_layer_replaced_before_the_first_step(guard: Guard) -> None:
    def body() -> None:
        seed_everything()
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model[2] = nn.Linear(8, 2)
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()

    assert steps_of(guard(body)) == {"stale-parameters": 0}


def test_a_layer_replaced_later(guard: Guard) -> None:
    def body() -> None:
        seed_everything()
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(16):
            if step == 7:
                model[2] = nn.Linear(8, 2)
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()

    assert steps_of(guard(body)) == {"stale-parameters": 7}


def test_a_branch_that_is_never_used(guard: Guard) -> None:
    def body() -> None:
        seed_everything()
        model = nn.ModuleList([nn.Linear(6, 8), nn.Linear(6, 8)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(12):
            optimizer.zero_grad()
            model[0](torch.randn(4, 6)).square().mean().backward()
            optimizer.step()

    assert steps_of(guard(body)) == {"unused-parameters": 0}


def test_a_scaler_over_float32(guard: Guard) -> None:
    def body() -> None:
        seed_everything()
        model = nn.Linear(6, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for _ in range(8):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(4, 6)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()

    assert steps_of(guard(body)) == {"needless-scaler": 0}


def test_weights_that_do_not_move(guard: Guard) -> None:
    def body() -> None:
        seed_everything()
        model = nn.Linear(16, 64).bfloat16()
        nn.init.constant_(model.weight, 1.0)
        nn.init.constant_(model.bias, 1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(40):
            optimizer.zero_grad()
            model(torch.randn(4, 16).bfloat16()).square().mean().backward()
            optimizer.step()

    run = guard(body)
    assert steps_of(run) == {"lost-update": 0}
    assert run.first.evidence["noticed_at_step"] >= 16
