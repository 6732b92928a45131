"""Scripts without AMP that look at their gradients themselves: the gained loss scale falls where they leave a step out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from override_loops import batches, model, weights
from torch import Tensor, nn

import ampguard

FACTOR = 100.0
"""Times the loss: its gradients overflow at the first scales."""


def losses_of(net: nn.Module, window: int, by_hand: bool) -> list[list[Callable[[], Tensor]]]:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16) if by_hand else contextlib.nullcontext():
            logits = net(x)
        return nn.functional.cross_entropy(logits.float(), y) * (FACTOR / window)

    each = [lambda x=x, y=y: loss(x, y) for x, y in batches(12 * window)]
    return [each[at : at + window] for at in range(0, len(each), window)]


def own_check(net: nn.Module, window: int, set_to_none: bool) -> int:
    """How many steps the script has left out."""
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    skipped = 0
    for losses in losses_of(net, window, by_hand=False):
        optimizer.zero_grad(set_to_none=set_to_none)
        for loss in losses:
            loss().backward()
        if torch.isfinite(nn.utils.clip_grad_norm_(net.parameters(), 1.0)):
            optimizer.step()
        else:
            skipped += 1
    return skipped


def by_hand(net: nn.Module, window: int) -> None:
    optimizer, scaler = torch.optim.AdamW(net.parameters(), 1e-2), torch.amp.GradScaler("cpu")
    for losses in losses_of(net, window, by_hand=True):
        optimizer.zero_grad()
        for loss in losses:
            scaler.scale(loss()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("window", [1, 3])
def test_the_run_is_that_of_a_scaler(overridden: Callable[..., Any], window: int, set_to_none: bool) -> None:
    expected = model()
    by_hand(expected, window)
    with overridden("fp16") as session:
        net = model()
        skipped = own_check(net, window, set_to_none)
    assert 0 < skipped < 12
    assert all(torch.equal(a, b) for a, b in zip(weights(net), weights(expected), strict=True))
    assert session.report.run["could_not"] == []


def test_an_amp_in_float32(overridden: Callable[..., Any]) -> None:
    """It skips by itself, and clears the gradients."""
    expected = model()
    by_hand(expected, 1)
    with overridden("fp16"):
        net = model()
        amp = ampguard.Amp(net, torch.optim.AdamW(net.parameters(), 1e-2), "fp32", max_grad_norm=1.0)
        for losses in losses_of(net, 1, by_hand=False):
            with amp.autocast():
                loss = losses[0]()
            amp.backward(loss)
            amp.step()
    assert 0 < amp.steps < 12
    for a, b in zip(weights(net), weights(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
