"""Functions that were compiled before the guard was on: their calls are not seen, and what they do is not disturbed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import fingerprint

from ampguard.incident import Report

Loop = Callable[[], Any]

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def loop(differentiates: bool, calls_module: bool, bad_at: int | None = None) -> Loop:
    """A training whose loss is computed by a function that is compiled already, and that Dynamo leaves once."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, head = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.01)

    @torch.compile(backend="aot_eager")
    def loss_of(out: Tensor, x: Tensor) -> Tensor:
        loss = out.square().mean() + x.mean().sqrt() + head(out).mean()
        torch._dynamo.graph_break()
        if calls_module:
            loss = loss + head(out).square().mean()
        if differentiates:
            loss.backward()
        return loss

    loss_of(model(torch.ones(3, 4)), torch.ones(3, 4))
    optimizer.zero_grad()

    def train() -> Any:
        for step in range(6):
            x = torch.full((8, 4), -1.0) if step == bad_at else torch.rand(8, 4) + 0.1
            loss = loss_of(model(x), x)
            if not differentiates:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.ones(2) + 1  # an operator without a tensor's Python behind it
        return fingerprint(model, optimizer)

    return train


@pytest.mark.parametrize("calls_module", [False, True])
@pytest.mark.parametrize("differentiates", [False, True])
def test_training_goes_on_as_without_the_guard(
    guarded: Callable[[Loop], tuple[Any, Report]], differentiates: bool, calls_module: bool
) -> None:
    plain = loop(differentiates, calls_module)()
    result, report = guarded(loop(differentiates, calls_module))
    assert result == plain
    assert report.incidents == ()


@pytest.mark.parametrize("differentiates", [False, True])
def test_failure_is_told_once_with_what_to_do(
    guarded: Callable[[Loop], tuple[Any, Report]], differentiates: bool
) -> None:
    _, report = guarded(loop(differentiates, calls_module=False, bad_at=4))
    (incident,) = report.incidents
    assert (incident.cause, incident.mode, incident.step) == ("unexplained", "train", 4)
    assert "ampguard.watch() before torch.compile is called" in incident.explanation
