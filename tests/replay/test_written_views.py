"""A batch that is a slice of the data and that the step changes in place: the replay changes a copy, and reads what it wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampguard.capture.glue import schedule

STEPS, BAD, SIZE = 7, 4, 5


def made() -> Tensor:
    torch.manual_seed(0)
    data = torch.randn(STEPS * SIZE, 3)
    data[BAD * SIZE : (BAD + 1) * SIZE, 1] = 2.0
    return data


def empties_a_row(x: Tensor, step: int) -> None:
    if step == BAD:
        x[2] = 0.0


def standardises(x: Tensor, step: int) -> None:
    x -= x.mean(0)
    x /= x.std(0)


def fills_by_a_mask(x: Tensor, step: int) -> None:
    flat = x.view(-1)
    flat[flat < (10.0 if step == BAD else -10.0)] = 0.0


def train(data: Tensor, change: Callable[[Tensor, int], None], has_module: bool) -> list[Tensor]:
    model = nn.Linear(3, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x = data[step * SIZE : (step + 1) * SIZE]
        change(x, step)
        hidden = model(x) if has_module else x @ model.weight
        loss = (hidden / hidden.square().sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if loss.isfinite():
            optimizer.step()
    return [data, model.weight.detach()]


@pytest.fixture(params=["operators", "calls"], autouse=True)
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs outside modules is kept operator by operator in long steps, and call by call in short ones."""
    monkeypatch.setattr(schedule, "LONG_STEP", 60.0 if request.param == "calls" else 0.0)


@pytest.mark.parametrize("has_module", [True, False])
@pytest.mark.parametrize(
    ("change", "code"),
    [
        (empties_a_row, "loss = (hidden / hidden.square().sum(1, keepdim=True)).square().mean()"),
        (fills_by_a_mask, "loss = (hidden / hidden.square().sum(1, keepdim=True)).square().mean()"),
        (standardises, "x /= x.std(0)"),
    ],
)
def test_a_slice_of_the_data_is_written_to(
    guard: Callable[..., Any], change: Callable[[Tensor, int], None], code: str, has_module: bool
) -> None:
    def body() -> list[Tensor]:
        return train(made(), change, has_module)

    plain = body()
    run = guard(body)
    assert run.faults == 0, run.stderr
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(run.result, plain, strict=True))
    assert (run.causes, run.first.step) == (["division-by-zero"], BAD)
    assert run.first.location.code == code
    assert run.first.evidence["rung"] == "replay"
    assert run.first.fixes[0].verified
