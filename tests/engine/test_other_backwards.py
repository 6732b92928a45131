"""A backward pass beside `amp.backward()`: refused where its loss was not scaled, let be where it carries a gradient on."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from engine_loops import batch, loss_of, made, model_of, same, train, weights
from torch import nn

import ampguard
from ampguard.errors import ProtocolError


@pytest.mark.parametrize("mode", ["fp16", "O2", "O3"])
def test_a_plain_backward_on_scaled_gradients_is_refused(mode: str) -> None:
    amp = made(mode)
    before = weights(amp)
    amp.backward(loss_of(amp, 0))
    loss_of(amp, 1).backward()
    with pytest.raises(ProtocolError, match=r"carry the loss scale 1024: what it added was not") as caught:
        amp.step()
    assert caught.value.cause == "unscaled-backward"
    first = test_a_plain_backward_on_scaled_gradients_is_refused.__code__.co_firstlineno + 5
    assert f"first   test_other_backwards.py:{first}\n" in str(caught.value)
    assert f"again   test_other_backwards.py:{first + 2}\n" in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before[:4], weights(amp)[:4], strict=True))
    amp.zero_grad()
    train(amp, range(2))
    assert amp.steps == 2


def test_it_is_refused_inside_a_window_and_before_unscaling() -> None:
    amp = made("fp16", accumulate=2)
    amp.backward(loss_of(amp, 0))
    loss_of(amp, 1).backward()
    with pytest.raises(ProtocolError, match="what it added was not"):
        amp.step()
    with pytest.raises(ProtocolError, match="what it added was not"):
        amp.unscale_()


def test_late_in_training_the_first_is_warned_of_and_the_second_refused(caplog: pytest.LogCaptureFixture) -> None:
    amp = made("fp16")
    train(amp, range(12))
    assert not any(p._post_accumulate_grad_hooks for p in model_of(amp).parameters())
    for _ in range(2):
        amp.backward(loss_of(amp, 0))
        loss_of(amp, 1).backward()
        if "changed by something else" not in caplog.text:
            amp.step()
    with pytest.raises(ProtocolError, match="what it added was not"):
        amp.step()


def cleared(amp: ampguard.Amp) -> None:
    loss_of(amp, 1).backward()
    amp.zero_grad()
    amp.backward(loss_of(amp, 0))


def zeroed(amp: ampguard.Amp) -> None:
    amp.backward(loss_of(amp, 0))
    loss_of(amp, 1).backward()
    model_of(amp).zero_grad(set_to_none=False)
    amp.backward(loss_of(amp, 0))


def put_back(amp: ampguard.Amp) -> None:
    amp.backward(loss_of(amp, 0))
    kept = [p.grad for p in model_of(amp).parameters()]
    model_of(amp).zero_grad()
    loss_of(amp, 1).backward()
    for p, gradient in zip(model_of(amp).parameters(), kept, strict=True):
        p.grad = gradient


def scaled_by_hand(amp: ampguard.Amp) -> None:
    amp.backward(loss_of(amp, 0))
    (loss_of(amp, 1) * amp.get_scale()).backward()


def after_unscaling(amp: ampguard.Amp) -> None:
    amp.backward(loss_of(amp, 0))
    amp.unscale_()
    loss_of(amp, 1).backward()


def gradients_only(amp: ampguard.Amp) -> None:
    amp.backward(loss_of(amp, 0))
    torch.autograd.grad(loss_of(amp, 1), list(model_of(amp).parameters()))


@pytest.mark.parametrize(
    "loop", [cleared, zeroed, put_back, scaled_by_hand, after_unscaling, gradients_only], ids=lambda loop: loop.__name__
)
def test_what_is_right_is_let_be(loop: object) -> None:
    amp = made("fp16")
    for _ in range(2):
        loop(amp)
        assert amp.step().stepped


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("mode", ["fp16", "O2"])
def test_a_gradient_is_carried_on(optimizers: int, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """Features are computed, the loss is differentiated up to them, and then they themselves."""

    def trained(in_two: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        encoder, head = nn.Linear(8, 16), nn.Linear(16, 1)
        groups = [[*encoder.parameters(), *head.parameters()]]
        groups = groups if optimizers == 1 else [list(encoder.parameters()), list(head.parameters())]
        amp = ampguard.Amp([encoder, head], [torch.optim.SGD(g, lr=0.05) for g in groups], mode, init_scale=1024.0)
        for number in range(12):
            x, y = batch(number)
            with amp.autocast():
                features = encoder(x)
                cut = features.detach().requires_grad_() if in_two else features
                loss = nn.functional.mse_loss(head(cut), y)
            amp.backward(loss)
            if in_two:
                features.backward(cut.grad)
            assert amp.step().stepped
        return weights(amp)

    assert same(trained(in_two=True), trained(in_two=False))
    assert not caplog.text


def test_the_hooks_keep_no_engine_alive() -> None:
    amp = made("fp16")
    model, gone = model_of(amp), weakref.ref(amp)
    del amp
    gc.collect()
    assert gone() is None
    model(batch(0)[0]).sum().backward()
