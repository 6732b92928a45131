"""What a closure computes before its first module: the optimizer's own step is where such a loop's step begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import Watched, fingerprint, seed_everything

from ampguard.capture.glue.tape import GlueTape

Guard = Callable[..., Watched]
ROWS, COUNT = 8, 12
LINE = "out = model(x / size)"


def batches(blank: int) -> list[tuple[Tensor, Tensor]]:
    seed_everything()
    return [
        (torch.rand(ROWS, 6) + 0.1 if i != blank else torch.zeros(ROWS, 6), torch.rand(ROWS, 3)) for i in range(COUNT)
    ]


def trained(blank: int, clears: bool, micro_steps: int = 1) -> dict[str, Any]:
    seed_everything()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def evaluated(x: Tensor, y: Tensor) -> Tensor:
        if clears:
            optimizer.zero_grad()
        size = x.abs().mean(1, keepdim=True)
        out = model(x / size)
        loss = (out - y).square().mean()
        if not clears and micro_steps == 1:
            optimizer.zero_grad()
        loss.backward()
        return loss

    for i, (x, y) in enumerate(torch.utils.data.DataLoader(batches(blank), batch_size=None)):  # type: ignore[arg-type]
        if (i + 1) % micro_steps:
            evaluated(x, y)  # Lightning accumulates so: a closure without an optimizer
            continue
        optimizer.step(lambda x=x, y=y: evaluated(x, y))  # type: ignore[misc]
        if micro_steps > 1:
            optimizer.zero_grad()
    return fingerprint(model, optimizer)


@pytest.mark.parametrize("clears", [True, False], ids=["cleared first", "cleared before backward"])
@pytest.mark.parametrize("blank", [0, 7])
def test_it_is_followed_to_its_line(blank: int, clears: bool, guard: Guard) -> None:
    plain = trained(blank, clears)
    run = guard(lambda: trained(blank, clears))
    assert run.faults == 0, run.stderr
    assert run.result == plain
    incident = run.first
    assert (incident.cause, incident.step, incident.op) == ("division-by-zero", blank, "aten.div.Tensor")
    assert incident.location is not None
    assert incident.location.code == LINE


@pytest.mark.parametrize("blank", [0, 1, 4, 5])
def test_so_it_is_where_the_closure_is_the_last_of_a_window(blank: int, guard: Guard) -> None:
    run = guard(lambda: trained(blank, clears=False, micro_steps=2))
    assert run.faults == 0, run.stderr
    incident = run.first
    assert (incident.cause, incident.step) == ("division-by-zero", blank // 2)
    assert incident.location is not None
    assert incident.location.code == LINE


def test_a_closure_that_does_nothing_behind_a_backward_pass_begins_no_step(
    guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning's manual optimisation gives one to each step: the optimizer's own arithmetic is not to be taped."""
    entered: list[bool] = []
    enter = GlueTape.enter
    in_step = [False]

    def noted(tape: GlueTape, limit: int) -> None:
        entered.append(in_step[0])
        enter(tape, limit)

    monkeypatch.setattr(GlueTape, "enter", noted)

    def body() -> None:
        seed_everything()
        model = nn.Linear(6, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(6):
            model(torch.rand(ROWS, 6)).square().mean().backward()
            in_step[0] = True
            optimizer.step(lambda: None)  # type: ignore[arg-type, return-value]
            in_step[0] = False
            optimizer.zero_grad()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert sum(entered) <= 6, "only behind a step, for the next one's preprocessing"
