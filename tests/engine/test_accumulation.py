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
        assert result.loss_scale == amp.get_scale()
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


def test_a_window_is_ended_after_the_loop() -> None:
    """Two micro-steps of four were counted: the mean is over two."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = ampguard.Amp(model, optimizer, "fp32", accumulate=4, max_grad_norm=math.inf)
    for number in range(2):
        x, y = batch(number)
        amp.backward(nn.functional.mse_loss(model(x), y))
        assert amp.step().accumulating
    assert amp.step(last=True).grad_norm == pytest.approx(norm_of_mean(range(2)), rel=1e-5)
    with pytest.raises(ProtocolError, match=r"holds no gradient any more(.|\n)*if result.accumulating"):
        amp.step(last=True)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_micro_step_without_backward_is_refused(precision: str) -> None:
    amp = made(precision, accumulate=2)
    train(amp, range(1))
    with pytest.raises(ProtocolError, match=r"after micro-step 1 of 2, and amp.backward\(\) was not called since"):
        amp.step()
    train(amp, range(1, 2))
    assert amp.steps == 1


def test_windows_of_different_lengths_do_not_end_together() -> None:
    models = [nn.Linear(8, 1), nn.Linear(8, 1)]
    one, other = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models)
    amp = ampguard.Amp(models, {"one": one, "other": other}, "fp32", accumulate=4)
    x, y = batch(0)
    for chosen in ("one", None):
        amp.backward(sum(nn.functional.mse_loss(model(x), y) for model in models))
        amp.step(chosen)
    with pytest.raises(ProtocolError, match="`one` 2, `other` 1"):
        amp.step(last=True)
    assert amp.step("one", last=True).stepped
    assert amp.step("other", last=True).stepped


def test_a_state_from_between_backward_and_step_goes_on() -> None:
    first = made("fp16", accumulate=2)
    train(first, range(1))
    first.backward(loss_of(first, 1))
    second = made("fp16", accumulate=2, seed=1)
    second.load_state_dict(first.state_dict())
    assert second.step().stepped
    first.step()
    assert same(weights(first), weights(second))
