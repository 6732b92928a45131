"""A number that the script prints as a tensor, and reads in no other way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from watching import Watched


def evaluate(show: Callable[[Tensor], str], spread: float) -> list[str]:
    model = nn.Linear(4, 2).eval()
    with torch.no_grad():
        error = (model(torch.randn(8, 4)) - 1).square().mean()
        return [show(error / torch.full((8,), spread).square().mean())]


@pytest.mark.parametrize("show", [repr, str, lambda value: str({"r2": value}), "{}".format])
def test_printed(show: Callable[[Tensor], str], guard: Callable[..., Watched]) -> None:
    run = guard(lambda: evaluate(show, 0.0))
    assert [(i.mode, i.cause) for i in run.report.incidents] == [("eval", "division-by-zero")]
    assert "inf" in run.result[0]
    assert not run.faults


def test_finite(guard: Callable[..., Watched]) -> None:
    shown = torch.Tensor.__repr__
    run = guard(lambda: evaluate(repr, 1.0))
    assert run.report.incidents == ()
    assert torch.Tensor.__repr__ is shown
