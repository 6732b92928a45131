"""In inference mode PyTorch hands on `item()` and `bool()` themselves, not the operator that they call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


def told(loss: Tensor) -> float:
    return loss.item()


def printed(loss: Tensor) -> str:
    return f"{loss:.3f}"


def asked(loss: Tensor) -> bool:
    return bool(torch.isnan(loss))


def asked_of_finite(loss: Tensor) -> bool:
    return bool(torch.isfinite(loss))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("read", [told, printed, asked, asked_of_finite])
def test_a_bad_number_that_is_computed_outside_modules_is_seen(
    guard: Guard, read: Callable[[Tensor], Any], mode: Callable[[], Any]
) -> None:
    def body() -> Any:
        torch.manual_seed(0)
        net = nn.Linear(4, 4).eval()
        with mode():
            hidden = net(torch.randn(3, 4))
            kept = torch.tensor([True, False, True])
            mean = (hidden * kept[:, None]) / kept[:, None]
            return read(mean.sum())

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.mode) == ("division-by-zero", "eval")
    assert run.first.location.code == "mean = (hidden * kept[:, None]) / kept[:, None]"


def test_a_good_one_is_none(guard: Guard) -> None:
    def body() -> float:
        net = nn.Linear(4, 4).eval()
        with torch.inference_mode():
            loss = net(torch.ones(3, 4)).square().mean()
            assert not torch.isnan(loss)
            return loss.item()

    run = guard(body)
    assert not run.report.incidents
