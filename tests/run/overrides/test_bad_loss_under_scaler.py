"""A scaler looks at gradients alone: a bad loss whose gradients are finite is held off all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from override_loops import weights
from torch import Tensor, nn

BAD = {3, 5}


def train(term: Callable[[Tensor], Tensor], leaves_out: bool, scale: float = 8.0, gain: float = 3e3) -> list[Tensor]:
    """`leaves_out`: the loop itself makes no step of what is bad."""
    torch.manual_seed(1)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    generator = torch.Generator().manual_seed(2)
    for step in range(8):
        x = torch.randn(6, 4, generator=generator) * (gain if step in BAD else 1.0)
        if leaves_out and step in BAD:
            continue
        with torch.autocast("cpu", dtype=torch.float16):
            loss = term(model(x))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return weights(model)


def finite_gradients(output: Tensor) -> Tensor:
    """The square of what is large overflows, and 1 / (1 + Inf) is 0: no gradient comes of it, and none of it is bad."""
    return torch.log1p((output.detach() ** 2).sum()) + output.tanh().mean()


def test_a_bad_loss_with_finite_gradients_is_held_off(overridden: Callable[..., Any]) -> None:
    without = train(finite_gradients, leaves_out=True)
    assert any(not torch.equal(a, b) for a, b in zip(train(finite_gradients, leaves_out=False), without, strict=True))
    with overridden(on_nonfinite="skip") as session:
        skipped = train(finite_gradients, leaves_out=False)
    assert session.report.run["steps_held_off"] == len(BAD)
    for a, b in zip(skipped, without, strict=True):
        assert torch.equal(a, b)


def test_a_loss_that_overflows_only_as_it_is_scaled_is_no_bad_one(overridden: Callable[..., Any]) -> None:
    """A float16 loss of one dimension times 8192 is Inf, its gradients fit."""

    def term(output: Tensor) -> Tensor:
        return output.tanh().half().mean(dim=(0, 1), keepdim=True).reshape(1) * 1e-3 + 60.0

    plain = train(term, leaves_out=False, scale=8192.0, gain=1.0)
    with overridden(on_nonfinite="skip") as session:
        guarded = train(term, leaves_out=False, scale=8192.0, gain=1.0)
    assert session.report.run["steps_held_off"] == 0
    for a, b in zip(guarded, plain, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", ["skip", "heal"])
def test_it_is_said_that_the_loss_was_bad(
    overridden: Callable[..., Any], mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with overridden(on_nonfinite=mode):
        train(lambda output: output.float().mean() / (output.abs().amax() < 1e3), leaves_out=False)
    assert "held off, the loss is not finite" in capsys.readouterr().err
