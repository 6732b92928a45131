from __future__ import annotations

import math

import pytest
import torch
from engine_loops import MODES, batch, loss_of, made, model_of, same, train, weights
from torch import nn

import ampguard
from ampguard.errors import ProtocolError, SetupError


def accumulated(precision: str, window: int, micro_steps: int, last: bool = False) -> list[float | None]:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    amp = ampguard.Amp(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        precision,
        accumulate=window,
        init_scale=64.0,
        max_grad_norm=math.inf,
    )
    norms = []
    for number in range(micro_steps):
        x, y = batch(number)
        with amp.autocast():
            loss = nn.functional.mse_loss(model(x), y)
        amp.backward(loss)
        result = amp.step(last=last and number == micro_steps - 1)
        norms.append(result.grad_norm)
        assert result.accumulating is (result.grad_norm is None)
        assert result.stepped is not result.accumulating
    return norms


def norm_of_mean(numbers: range) -> float:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    losses = [nn.functional.mse_loss(model(x), y) for x, y in map(batch, numbers)]
    gradients = torch.autograd.grad(sum(losses) / len(losses), list(model.parameters()))
    return float(torch.stack([g.norm() for g in gradients]).norm())


@pytest.mark.parametrize("precision", ["fp32", "fp16", "O2", "bf16"])
def test_a_window_steps_on_the_mean(precision: str) -> None:
    norms = accumulated(precision, window=4, micro_steps=4)
    assert norms[:3] == [None] * 3
    assert norms[3] == pytest.approx(norm_of_mean(range(4)), rel=1e-2)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_window_that_ends_early_is_a_mean_too(precision: str) -> None:
    norms = accumulated(precision, window=4, micro_steps=3, last=True)
    assert norms[2] == pytest.approx(norm_of_mean(range(3)), rel=1e-2)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_accumulates(mode: str) -> None:
    amp = made(mode, accumulate=3)
    before = weights(amp)
    train(amp, range(2))
    assert amp.steps == 0
    assert same([w for w in before if w.ndim == 2], [w for w in weights(amp) if w.ndim == 2])
    train(amp, range(2, 12))
    assert amp.steps == 4


def test_a_bad_micro_batch_skips_the_window() -> None:
    amp = made("bf16", accumulate=2)
    train(amp, range(4), spoil={1: float("nan")})
    assert amp.steps == 1


@pytest.mark.parametrize("set_to_none", [True, False])
def test_clearing_inside_a_window_is_refused(set_to_none: bool) -> None:
    amp = made("fp16", accumulate=2)
    train(amp, range(1))
    amp.optimizers["AdamW"].zero_grad(set_to_none=True)
    with pytest.raises(ProtocolError, match=r"cleared after micro-step 1 of 2.*\n.*\n.*delete the zero_grad") as caught:
        train(amp, range(1, 2)) if set_to_none else amp.step()
    assert caught.value.cause == "accumulation-broken"


def test_one_may_drop_a_window_on_purpose() -> None:
    amp = made("fp16", accumulate=2)
    train(amp, range(1))
    amp.zero_grad()
    train(amp, range(1, 3))
    assert amp.steps == 1


def test_an_impossible_window_is_refused() -> None:
    with pytest.raises(SetupError, match="accumulate=0"):
        made(accumulate=0)


def test_two_losses_in_a_micro_step() -> None:
    amp = made("fp16", accumulate=2)
    for number in range(4):
        amp.backward(loss_of(amp, number))
        amp.backward([loss_of(amp, number + 10), loss_of(amp, number + 20)])
        amp.step()
    assert amp.steps == 2
    assert model_of(amp).training
