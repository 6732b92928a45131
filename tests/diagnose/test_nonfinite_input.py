"""One bad sample reaches a step by several ways: what cleaning it would cure is tried on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


def render(net: nn.Module, origins: Tensor, directions: Tensor) -> Tensor:
    """Two passes along rays: the points of the second are made from the rays once more, where the first is dense."""
    depths = torch.linspace(2.0, 6.0, 8).expand(len(origins), 8)
    density = net(origins[:, None, :] + directions[:, None, :] * depths[..., None])
    finer = depths + torch.sigmoid(density.squeeze(-1)).detach()
    points = origins[:, None, :] + directions[:, None, :] * finer[..., None]
    return torch.sigmoid(net(points)).mean(1)


def train(bad_view: int | None) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for step in range(5):
        origins, directions = torch.randn(6, 3), torch.randn(6, 3)
        if step == bad_view:
            origins[2, 0] = float("nan")
        loss = nn.functional.mse_loss(render(net, origins, directions), torch.rand(6, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()


def test_cleaning_is_tried_on_everything_that_holds_nan(guard: Guard) -> None:
    run = guard(lambda: train(bad_view=3))
    assert (run.first.cause, run.first.step, run.first.phase) == ("nonfinite-input", 3, "data")
    assert {fix.action: fix.verified for fix in run.first.fixes} == {"filter-sample": True, "fix-data": True}
    assert all("more tensors with NaN that the step was given" in fix.how for fix in run.first.fixes)


def test_good_rays_are_silent(guard: Guard) -> None:
    assert guard(lambda: train(bad_view=None)).causes == []
