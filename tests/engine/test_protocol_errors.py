"""Every wrong order of calls raises our own error, which says what to do; nothing has changed then."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from engine_loops import batch, loss_of, made, model_of, same, train, weights
from torch import nn

import ampguard
from ampguard.errors import LossError, ProtocolError, SetupError


def double_unscale(amp: ampguard.Amp) -> None:
    amp.backward(loss_of(amp, 0))
    amp.unscale_()
    amp.unscale_()


def backward_after_unscale(amp: ampguard.Amp) -> None:
    amp.backward(loss_of(amp, 0))
    amp.unscale_()
    amp.backward(loss_of(amp, 1))
    amp.step()


def plain_backward(amp: ampguard.Amp) -> None:
    loss_of(amp, 0).backward()
    amp.step()


def no_backward(amp: ampguard.Amp) -> None:
    loss_of(amp, 0)
    amp.step()


def cleared_before_the_step(amp: ampguard.Amp) -> None:
    amp.backward(loss_of(amp, 0))
    model_of(amp).zero_grad()
    amp.step()


def own_step(amp: ampguard.Amp) -> None:
    amp.backward(loss_of(amp, 0))
    amp.optimizers["AdamW"].step()


def step_twice(amp: ampguard.Amp) -> None:
    train(amp, range(1))
    weights(amp)
    amp.step()


def unscaled_before_backward(amp: ampguard.Amp) -> None:
    amp.unscale_()
    amp.backward(loss_of(amp, 0))


def gradients_written_by_hand(amp: ampguard.Amp) -> None:
    for p in model_of(amp).parameters():
        p.grad = torch.ones_like(p)
    amp.step()


CASES: dict[Callable[[ampguard.Amp], None], tuple[str, str]] = {
    double_unscale: ("double-unscale", "delete the second amp.unscale_()"),
    backward_after_unscale: ("accumulation-broken", "call amp.unscale_() once"),
    plain_backward: ("unscaled-backward", "call amp.backward(loss) instead of loss.backward()"),
    no_backward: ("no-gradients", "call amp.backward(loss) before it"),
    cleared_before_the_step: ("no-gradients", "call zero_grad before amp.backward"),
    own_step: ("bypassed-scaler", "call amp.step(optimizer) instead"),
    unscaled_before_backward: ("no-gradients", "call amp.unscale_() after the last amp.backward()"),
    gradients_written_by_hand: ("unscaled-backward", "where amp.unscale_(optimizer) is called before"),
    step_twice: ("no-gradients", "call amp.backward(loss) before each amp.step()"),
}


@pytest.mark.parametrize("misuse", CASES, ids=lambda misuse: misuse.__name__)
def test_misuse_is_explained(misuse: Callable[[ampguard.Amp], None]) -> None:
    cause, fix = CASES[misuse]
    amp = made("fp16")
    optimizer = amp.optimizers["AdamW"]
    with pytest.raises(ProtocolError) as caught:
        misuse(amp)
    assert caught.value.cause == cause
    assert fix in str(caught.value)
    assert f"ampguard explain {cause}" in str(caught.value)
    assert "test_protocol_errors.py:" in str(caught.value)
    if misuse is not step_twice:
        assert not optimizer.state
    amp.zero_grad()
    train(amp, range(3))
    assert amp.steps >= 3


def test_both_lines_are_named() -> None:
    amp = made("fp16")
    with pytest.raises(ProtocolError) as caught:
        double_unscale(amp)
    first = double_unscale.__code__.co_firstlineno + 2
    assert f"first   test_protocol_errors.py:{first}\n" in str(caught.value)
    assert f"again   test_protocol_errors.py:{first + 1}\n" in str(caught.value)


@pytest.mark.parametrize("mode", ["O2", "bf16-true"])
def test_modes_with_an_update_of_their_own_refuse_the_optimizers_step(mode: str) -> None:
    amp = made(mode)
    amp.backward(loss_of(amp, 0))
    with pytest.raises(ProtocolError, match=r"call amp.step\(optimizer\) instead"):
        amp.optimizers["AdamW"].step()
    assert amp.step().stepped


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_without_a_loss_scale_a_plain_backward_and_step_are_harmless(mode: str) -> None:
    amp = made(mode)
    loss_of(amp, 0).backward()
    assert amp.step().stepped
    amp.backward(loss_of(amp, 1))
    amp.optimizers["AdamW"].step()
    amp.zero_grad()
    train(amp, range(2))
    assert amp.steps == 3


def test_clipping_by_hand_needs_unscale() -> None:
    amp = made("fp16", init_scale=1024.0, max_grad_norm=math.inf)
    amp.backward(loss_of(amp, 0))
    amp.unscale_()
    norm = nn.utils.clip_grad_norm_(model_of(amp).parameters(), 1e-3)
    result = amp.step()
    assert result.grad_norm == pytest.approx(1e-3, rel=1e-3)
    assert norm < 100
    assert result.loss_scale == 1024.0


def test_clipping_scaled_gradients_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    amp = made("fp16", init_scale=1024.0)
    for number in range(3):
        amp.backward(loss_of(amp, number))
        nn.utils.clip_grad_norm_(model_of(amp).parameters(), 1.0)
        amp.step()
    assert caplog.text.count("were changed by something else between amp.backward() and amp.step()") == 1
    assert "loss scale 1024" in caplog.text


def test_unscaling_one_of_two_that_step_together() -> None:
    torch.manual_seed(0)
    a, b = nn.Linear(8, 1), nn.Linear(8, 1)
    opt_a, opt_b = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (a, b))
    amp = ampguard.Amp([a, b], {"a": opt_a, "b": opt_b}, init_scale=1024.0, max_grad_norm=math.inf)
    x, y = batch(0)
    loss = nn.functional.mse_loss(a(x) + b(x), y)
    expected = torch.autograd.grad(loss, [*a.parameters(), *b.parameters()], retain_graph=True)
    amp.backward(loss)
    amp.unscale_("a")
    torch.testing.assert_close(a.weight.grad, expected[0])
    assert amp.step().grad_norm == pytest.approx(float(torch.stack([g.norm() for g in expected]).norm()), rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (torch.tensor(1.0), "needs no gradient: nothing that requires a gradient is in it"),
        (torch.ones(3, requires_grad=True) * 2, "shape (3,)"),
        (1.0, "takes a loss tensor, not a float"),
        (torch.ones((), dtype=torch.complex64, requires_grad=True) * 2, "the loss is complex (torch.complex64)"),
    ],
)
def test_bad_losses(loss: object, says: str) -> None:
    amp = made("fp16")
    with pytest.raises(LossError) as caught:
        amp.backward([loss])
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (1.0, "not a float.*\n.*loss.item"),
        ({"a": torch.tensor(1.0)}, r"mapping of 'a'\n.*list\(losses.values"),
        ([], "the list is empty"),
    ],
)
def test_what_is_no_loss(given: object, says: str) -> None:
    with pytest.raises(LossError, match=says):
        made("fp16").backward(given)


def test_a_backward_pass_for_frozen_parameters_only() -> None:
    frozen, learning = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 1)
    optimizers = {
        "frozen": torch.optim.SGD(frozen.parameters(), 0.1),
        "head": torch.optim.SGD(learning.parameters(), 0.1),
    }
    amp = ampguard.Amp([frozen, learning], optimizers, "fp16")
    with pytest.raises(ProtocolError, match="`frozen`, none of whose parameters requires a gradient"):
        amp.backward(learning(frozen(batch(0)[0])).mean(), "frozen")


def test_what_is_none_of_the_optimizers() -> None:
    amp = made("fp16")
    for given, says in (
        ("Adam", "no optimizer 'Adam'\n.*'AdamW'"),
        (lambda: 0.0, r"a function is no optimizer\n.*amp.step\(optimizer, closure\)"),
        (torch.optim.SGD(model_of(amp).parameters(), lr=0.1), "this SGD is not one of"),
    ):
        with pytest.raises(SetupError, match=says):
            amp.step(given)


def test_a_loss_under_no_grad() -> None:
    amp = made("fp16")
    with torch.no_grad(), pytest.raises(LossError, match="computed under no_grad"):
        amp.backward(loss_of(amp, 0))


def test_a_float16_loss_stays_finite_when_scaled() -> None:
    amp = made("fp16", init_scale=2.0**15)
    x, _ = batch(0)
    with amp.autocast():
        output = model_of(amp)(x)
    loss = (output * 1e-3).abs().mean() + 8.0
    assert loss.dtype == torch.float16
    amp.backward(loss)
    assert amp.step().stepped


def test_nothing_moves_before_the_error() -> None:
    amp = made("fp16")
    train(amp, range(2))
    amp.backward(loss_of(amp, 5))
    amp.unscale_()
    amp.backward(loss_of(amp, 6))
    before = weights(amp)
    with pytest.raises(ProtocolError):
        amp.step()
    assert same(before, weights(amp))


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_unscaling_where_there_is_no_scale_changes_nothing(mode: str) -> None:
    """The same loop serves every precision."""
    amp = made(mode)
    for number in range(3):
        amp.backward(loss_of(amp, number))
        amp.backward(loss_of(amp, number + 10))
        amp.unscale_()
        nn.utils.clip_grad_norm_(model_of(amp).parameters(), 1.0)
        assert amp.step().stepped


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_two_engines_over_one_optimizer(mode: str) -> None:
    scaling = made("fp16")
    other = ampguard.Amp(model_of(scaling), scaling.optimizers["AdamW"], mode, max_grad_norm=1e9)
    for call in (other.step, lambda: other.backward(loss_of(other, 0))):
        scaling.backward(loss_of(scaling, 0))
        before = [p.detach().clone() for p in model_of(scaling).parameters()]
        with pytest.raises(ProtocolError, match=r"backward\(\) of another Amp, 1024 times too large") as caught:
            call()
        assert caught.value.cause == "bypassed-scaler"
        assert same(before, list(model_of(scaling).parameters()))
        assert scaling.step().stepped  # that one knows what it has multiplied
    train(other, range(2))
    train(scaling, range(2))
    train(other, range(2))
