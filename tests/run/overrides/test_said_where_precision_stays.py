"""What `--precision` does not reach is said: forward passes called as functions, autocast without a region, low weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(hidden @ hidden.t() @ hidden)

    def loss(self, x: Tensor) -> Tensor:
        return self.forward(x).square().mean()


@pytest.mark.parametrize("calls_forward", [True, False])
def test_a_forward_pass_called_as_a_function(overridden: Callable[..., Any], calls_forward: bool) -> None:
    with overridden("bf16") as session:
        net, x = Products(), torch.ones(4, 8)
        for _ in range(2):
            (net.loss(x) if calls_forward else net(x).square().mean()).backward()
    said = session.report.run["could_not"]
    assert ["the script calls Products.forward itself" in text for text in said] == ([True] if calls_forward else [])


@pytest.mark.parametrize(("precision", "is_right"), [("fp32", False), ("fp16", False), ("bf16", True)])
def test_autocast_that_is_switched_on_without_a_region(
    overridden: Callable[..., Any], precision: str, is_right: bool
) -> None:
    before = torch.get_autocast_dtype("cpu")
    with overridden(precision) as session:
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.bfloat16)
        try:
            nn.Linear(8, 4)(torch.ones(2, 8)).float().sum().backward()
        finally:
            torch.set_autocast_enabled("cpu", False)
            torch.set_autocast_dtype("cpu", before)
            torch.clear_autocast_cache()
    run = session.report.run
    assert ["autocast in bfloat16 is on without a region" in text for text in run["could_not"]] == [True] * (
        not is_right
    )
    assert "found no autocast region and no GradScaler to switch off" not in run["did"]


@pytest.mark.parametrize("precision", ["bf16", "bf16-true"])
def test_weights_that_are_of_this_type_already(overridden: Callable[..., Any], precision: str) -> None:
    with overridden(precision) as session:
        nn.Linear(8, 4).bfloat16()(torch.ones(2, 8).bfloat16()).sum().backward()
    (said,) = session.report.run["could_not"]
    assert said.startswith(
        "the weights of Linear are bfloat16 by the script's own doing: it computes in that type already"
    )
