"""A factor of the script's own that is infinite is no overflow: nothing is too large but the number itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from watching import Watched

Guard = Callable[..., Watched]


@pytest.mark.parametrize(("factor", "cause"), [(float("inf"), "nonfinite-input"), (1e39, "overflow")])
def test_it_is_told_as_what_the_script_gave(guard: Guard, factor: float, cause: str) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
        for step in range(4):
            weight = factor if step == 2 else 1.0
            loss = (net(torch.randn(5, 4)).double() * weight).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.step) == (cause, 2)
    assert ("a number of the script's own that is infinite" in run.first.explanation) == (cause == "nonfinite-input")


def test_a_mask_times_infinity_was_meant_to_hide_the_rest(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
        for step in range(4):
            keep = torch.ones(5, 4)
            if step == 2:
                keep[:, -1] = 0
            scores = net(torch.randn(5, 4))
            if step >= 2:
                scores = scores + (1.0 - keep) * float("-inf")
            loss = -scores.log_softmax(-1)[:, 0].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert (run.first.cause, run.first.step, run.first.op) == ("indeterminate", 2, "aten.mul.Tensor")


def test_infinite_weights_beside_a_fraction_are_data_in_a_small_batch_too(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
        for step in range(4):
            weights = torch.tensor([float("inf"), float("inf"), 0.5, 0.5] if step == 2 else [0.25, 0.5, 1.0, 0.5])
            losses = net(torch.randn(4, 4)).square().squeeze(1)
            loss = (losses * weights).sum() / weights.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.step) == ("nonfinite-input", 2)
    assert [fix.verified for fix in run.first.fixes] == [True, True]
