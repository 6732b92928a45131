"""Gradients that a loop makes or changes itself between the calls of a one-call scaler: refused or told, never lost silently."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from digits_loops import batches, loss_of, network
from torch import nn

import ampguard
from ampguard.errors import ProtocolError
from ampguard.integrations.timm import NativeScaler, NativeScalerWithGradNormCount

Loop = Callable[[nn.Module, torch.optim.Optimizer, NativeScaler], None]


def penalty(model: nn.Module) -> torch.Tensor:
    return sum(p.float().square().sum() for p in model.parameters())


def beside_each_loss(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: NativeScaler) -> None:
    for batch in batches(4):
        optimizer.zero_grad()
        (0.1 * penalty(model)).backward()
        scaler(loss_of(model, batch), optimizer)


def before_the_first_call(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: NativeScaler) -> None:
    penalty(model).backward()
    scaler(loss_of(model, next(batches(1))), optimizer)


def from_some_epoch_on(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: NativeScaler) -> None:
    for number, batch in enumerate(batches(24)):
        optimizer.zero_grad()
        if number >= 12:
            penalty(model).backward()
        scaler(loss_of(model, batch), optimizer)


def inside_a_window(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: NativeScaler) -> None:
    for number, batch in enumerate(batches(8)):
        scaler(loss_of(model, batch), optimizer, need_update=number % 4 == 3)
        if number % 4 == 3:
            optimizer.zero_grad()
        elif number % 4 == 1:
            penalty(model).backward()


@pytest.mark.parametrize("loop", [beside_each_loss, before_the_first_call, from_some_epoch_on, inside_a_window])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_loss_that_was_not_scaled_is_refused(loop: Loop, level: str) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    chosen = ampguard.precision(level, "cpu")
    chosen.prepare(model, optimizer)
    with pytest.raises(ProtocolError, match=r"was not scaled(.|\n)*give the scaler the sum of the losses") as refused:
        loop(model, optimizer, NativeScaler(precision=chosen))
    assert refused.value.cause == "unscaled-backward"
    assert "test_losses_beside_the_scaler.py" in str(refused.value)


def adversarial(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: NativeScaler, to_none: bool) -> None:
    for x, y in batches(24):
        x = x.clone().requires_grad_()
        loss_of(model, (x, y)).backward()
        optimizer.zero_grad(set_to_none=to_none)
        scaler(loss_of(model, ((x + 0.1 * x.grad.sign()).detach(), y)), optimizer)
        optimizer.zero_grad(set_to_none=to_none)


def with_gradients_left_by_another_loss(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: NativeScaler
) -> None:
    """As a discriminator's are left by its generator's loss: they carry the scale."""
    maker = nn.Linear(8, 8)
    other = torch.optim.SGD(maker.parameters(), 1e-3)
    for x, y in batches(24):
        scaler(loss_of(nn.Sequential(maker, model), (x, y)), other)
        other.zero_grad()
        scaler(loss_of(model, (x, y)), optimizer)
        optimizer.zero_grad()


def carried_on_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: NativeScaler) -> None:
    features, head = model[:1], model[1:]
    for x, y in batches(8):
        with torch.autocast("cpu", dtype=torch.float16):
            computed = features(x)
        leaf = computed.detach().requires_grad_()
        scaler(loss_of(head, (leaf, y)), optimizer, need_update=False)
        computed.backward(leaf.grad)
        scaler(loss_of(model, (x, y)), optimizer)
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "loop",
    [
        lambda *given: adversarial(*given, to_none=True),
        lambda *given: adversarial(*given, to_none=False),
        with_gradients_left_by_another_loss,
        carried_on_by_hand,
    ],
)
def test_what_is_right_is_let_be(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    scaler = NativeScaler(init_scale=1024.0)
    with caplog.at_level(logging.WARNING, "ampguard"):
        loop(model, torch.optim.SGD(model.parameters(), 1e-3), scaler)
    assert not caplog.records
    assert not scaler.result.skipped


def test_without_a_loss_scale_another_loss_is_added() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    beside_each_loss(model, optimizer, NativeScaler(precision="bf16"))


def test_clipping_by_hand_inside_a_window_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 1e-3), NativeScalerWithGradNormCount(init_scale=1024.0)
    with caplog.at_level(logging.WARNING, "ampguard"):
        for number, batch in enumerate(batches(12)):
            scaler(loss_of(model, batch), optimizer, update_grad=number % 4 == 3)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if number % 4 == 3:
                optimizer.zero_grad()
    (told,) = caplog.messages
    assert "inside an accumulation window" in told
    assert "give the scaler clip_grad=" in told
