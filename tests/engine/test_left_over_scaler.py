"""A GradScaler, or an autocast region, that a half-migrated loop still uses beside an Amp."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from engine_loops import batch, loss_of, made, model_of, same, train, weights
from torch import nn

import ampguard
from ampguard.errors import ProtocolError

Loop = Callable[[ampguard.Amp, torch.amp.GradScaler, torch.optim.Optimizer], object]


def backward_by_the_scaler(amp: ampguard.Amp, scaler: torch.amp.GradScaler, _: torch.optim.Optimizer) -> None:
    scaler.scale(loss_of(amp, 0)).backward()
    amp.step()


def scaled_twice(amp: ampguard.Amp, scaler: torch.amp.GradScaler, _: torch.optim.Optimizer) -> None:
    amp.backward(scaler.scale(loss_of(amp, 0)) / 2)


def scaled_twice_and_stepped_by_the_scaler(
    amp: ampguard.Amp, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
) -> None:
    amp.backward(scaler.scale(loss_of(amp, 0)))
    scaler.step(optimizer)
    scaler.update()


def stepped_by_the_scaler(amp: ampguard.Amp, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    amp.backward(loss_of(amp, 0))
    scaler.step(optimizer)


def unscaled_by_the_scaler(amp: ampguard.Amp, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    amp.backward(loss_of(amp, 0))
    scaler.unscale_(optimizer)


def updated_by_the_scaler(amp: ampguard.Amp, scaler: torch.amp.GradScaler, _: torch.optim.Optimizer) -> None:
    train(amp, range(1))
    scaler.update()


def one_loss_by_each(amp: ampguard.Amp, scaler: torch.amp.GradScaler, _: torch.optim.Optimizer) -> None:
    amp.backward(loss_of(amp, 0))
    scaler.scale(loss_of(amp, 1)).backward()
    amp.step()


def the_scalers_loss_first(amp: ampguard.Amp, scaler: torch.amp.GradScaler, _: torch.optim.Optimizer) -> None:
    scaler.scale(loss_of(amp, 1)).backward()
    amp.backward(loss_of(amp, 0))
    amp.step()


LOOPS: dict[Loop, str] = {
    backward_by_the_scaler: "scaler.scale(loss).backward()",
    scaled_twice: "a loss that scaler.scale() has multiplied by 65536",
    scaled_twice_and_stepped_by_the_scaler: "a loss that scaler.scale() has multiplied by 65536",
    stepped_by_the_scaler: "scaler.step() of a GradScaler that has scaled no loss",
    unscaled_by_the_scaler: "scaler.unscale_() of a GradScaler that has scaled no loss",
    updated_by_the_scaler: "scaler.update() of a GradScaler that has scaled no loss",
    one_loss_by_each: "65536 times too large",
    the_scalers_loss_first: "`AdamW` holds gradients",
}


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16", "O2"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_half_migrated_loop_is_refused_at_once(loop: Loop, mode: str) -> None:
    amp = made(mode)
    optimizer = amp.optimizers["AdamW"]
    with pytest.raises(ProtocolError) as caught:
        loop(amp, torch.amp.GradScaler("cpu"), optimizer)
    assert LOOPS[loop] in str(caught.value)
    assert "amp.backward(loss)" in str(caught.value)
    assert "test_left_over_scaler.py:" in str(caught.value)
    if loop is not updated_by_the_scaler:
        assert not optimizer.state
    amp.zero_grad()
    train(amp, range(2))


def test_gradients_that_another_scaler_has_divided_are_not_divided_again() -> None:
    """The scaler has scaled something else before, so PyTorch does not object."""
    amp, scaler = made("fp16"), torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones((), requires_grad=True))
    amp.backward(loss_of(amp, 0))
    scaler.unscale_(amp.optimizers["AdamW"])
    with pytest.raises(ProtocolError, match="has divided the gradients of `AdamW` by 65536") as caught:
        amp.step()
    assert caught.value.cause == "double-unscale"


def test_a_scaler_that_divides_what_it_multiplied_is_let_be_where_the_engine_scales_nothing() -> None:
    amp, scaler = made("bf16"), torch.amp.GradScaler("cpu")
    for number in range(3):
        scaler.scale(loss_of(amp, number)).backward()
        scaler.unscale_(amp.optimizers["AdamW"])
        nn.utils.clip_grad_norm_(model_of(amp).parameters(), 1.0)
        assert amp.step().stepped
        scaler.update()


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_another_models_scaler_is_no_business_of_the_engine(mode: str) -> None:
    amp, scaler = made(mode), torch.amp.GradScaler("cpu", init_scale=4.0)
    other = nn.Linear(8, 1)
    own = torch.optim.SGD(other.parameters(), lr=0.01)
    weight = torch.tensor(0.5)
    for number in range(3):
        scaler.scale(other(batch(number)[0]).square().mean()).backward()
        scaler.step(own)
        scaler.update()
        own.zero_grad()
        amp.backward(loss_of(amp, number) * weight)
        if mode == "bf16":
            nn.utils.clip_grad_norm_(model_of(amp).parameters(), 1.0)
        assert amp.step().stepped


def test_a_scaler_that_is_switched_off_changes_nothing() -> None:
    amp, plain, scaler = made("fp16"), made("fp16"), torch.amp.GradScaler("cpu", enabled=False)
    torch.manual_seed(1)
    amp.backward(scaler.scale(loss_of(amp, 0)))
    scaler.unscale_(amp.optimizers["AdamW"])
    amp.step()
    scaler.update()
    torch.manual_seed(1)
    train(plain, range(1))
    assert same(weights(amp), weights(plain))


def test_a_plain_backward_before_the_engines_own_is_not_divided_away() -> None:
    amp = made("fp16")
    loss_of(amp, 0).backward()
    with pytest.raises(ProtocolError, match="holds gradients already, which"):
        amp.backward(loss_of(amp, 1))


def test_gradients_that_are_zero_are_none() -> None:
    amp = made("fp16")
    for parameter in model_of(amp).parameters():
        parameter.grad = torch.zeros_like(parameter)
    train(amp, range(2))
    assert amp.steps == 2


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_float16_without_a_loss_scale_is_said_once(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    amp = made(mode)
    x, y = batch(0)
    with caplog.at_level(logging.WARNING, "ampguard"):
        for _ in range(3):
            with amp.autocast(), torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.mse_loss(model_of(amp)(x), y)
            amp.backward(loss)
            amp.step()
    assert caplog.text.count("has no loss scale") == (0 if mode == "fp16" else 1)


def test_a_closure_whose_loss_a_scaler_has_multiplied_is_refused() -> None:
    torch.manual_seed(0)
    model, scaler = nn.Linear(8, 1), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.LBFGS(model.parameters())
    amp = ampguard.Amp(model, optimizer, "bf16")
    x, y = batch(0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        return loss

    with pytest.raises(ProtocolError, match="65536 times too large"):
        amp.step(optimizer, closure)


def test_a_loop_of_its_own_beside_an_amp_hears_what_pytorch_says() -> None:
    amp = made("fp16")
    other = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    for call in (torch.amp.GradScaler.step, torch.amp.GradScaler.unscale_):
        with pytest.raises(AssertionError, match="_scale is None"):
            call(torch.amp.GradScaler("cpu"), other)
    train(amp, range(1))
