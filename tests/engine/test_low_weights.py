"""Weights that are in a low precision already, optimizers that are given twice or grow."""

from __future__ import annotations

import logging

import pytest
import torch
from engine_loops import Net, batch, made, model_of, train
from torch import nn

import ampguard
from ampguard.errors import PrecisionError, SetupError


@pytest.mark.parametrize("mode", ["fp32", "fp16", "bf16"])
def test_float16_weights_under_autocast_are_refused(mode: str) -> None:
    model = nn.Linear(8, 1).half()
    with pytest.raises(
        PrecisionError, match=rf"float16 weights, precision '{mode}' needs float32 ones.*fp16-parameters"
    ):
        ampguard.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), mode)


def test_frozen_float16_weights_are_fine() -> None:
    torch.manual_seed(0)
    body, head = nn.Linear(8, 8).half().requires_grad_(False), nn.Linear(8, 1)
    amp = ampguard.Amp([body, head], torch.optim.SGD(head.parameters(), lr=0.1), "fp16", init_scale=64.0)
    with amp.autocast():
        loss = head(body(batch(0)[0])).float().square().mean()
    amp.backward(loss)
    assert amp.step().stepped


def test_bfloat16_weights_under_autocast_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(8, 1).bfloat16()
    ampguard.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    assert "precision='bf16-true' does not" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING


@pytest.mark.parametrize("mode", ["O2", "O3", "bf16-true"])
def test_a_converted_model_belongs_to_its_amp(mode: str) -> None:
    amp = made(mode)
    with pytest.raises(SetupError, match="`Net` was changed by an Amp before"):
        ampguard.Amp(model_of(amp), amp.optimizers["AdamW"], mode)
    train(amp, range(2))
    assert amp.steps == 2


def test_an_amp_may_be_made_anew_over_float32_weights() -> None:
    amp = made("fp16")
    train(amp, range(2))
    amp.backward(amp_loss(amp))
    again = ampguard.Amp(model_of(amp), amp.optimizers["AdamW"], "fp16", init_scale=1024.0)
    again.zero_grad()
    train(again, range(3))
    assert again.steps == 3


def amp_loss(amp: ampguard.Amp) -> torch.Tensor:
    with amp.autocast():
        return model_of(amp)(batch(0)[0]).float().square().mean()


@pytest.mark.parametrize("mode", ["fp16", "O3"])
def test_an_evaluation_that_needs_other_weights_is_refused(mode: str) -> None:
    with pytest.raises(PrecisionError, match=r"eval_precision='O2' needs torch.float16 weights, the training mode"):
        made(mode, eval_precision="O2")


def test_parameters_may_be_added_where_weights_are_float32() -> None:
    torch.manual_seed(0)
    model = Net()
    model.inner.requires_grad_(False)
    optimizer = torch.optim.AdamW([*model.head.parameters(), *model.norm.parameters()], lr=1e-2)
    amp = ampguard.Amp(model, optimizer, "fp16", init_scale=1024.0)
    train(amp, range(2))
    model.inner.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.inner.parameters())})
    before = model.inner.weight.detach().clone()
    train(amp, range(2, 4))
    assert not torch.equal(before, model.inner.weight)
    assert amp.steps == 4


def test_parameters_cannot_be_added_to_a_converted_model() -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-2)
    amp = ampguard.Amp(model, optimizer, "O2", init_scale=1024.0)
    train(amp, range(1))
    optimizer.add_param_group({"params": list(model.inner.parameters())})
    with pytest.raises(SetupError, match="added to `AdamW` after Amp was made"):
        train(amp, range(1, 2))


def test_a_loss_that_holds_gradients() -> None:
    """A gradient penalty: differentiated twice."""
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    amp = ampguard.Amp(critic, torch.optim.Adam(critic.parameters(), lr=1e-2), "fp16", init_scale=256.0)
    penalties = []
    for number in range(20):
        x = batch(number)[0].requires_grad_()
        with amp.autocast():
            (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
            loss = (slope.norm(dim=1) - 1).square().mean()
        amp.backward(loss)
        assert amp.step().stepped
        penalties.append(loss.item())
    assert penalties[-1] < 0.5 * penalties[0]


def test_many_parameters_of_which_few_are_reached() -> None:
    """More tensors than are glanced at, of which the loss reaches one that is not."""
    model = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(200)])
    amp = ampguard.Amp(model, torch.optim.SGD(model.parameters(), lr=0.5), "fp16", init_scale=64.0)
    for index in (1, 2, 197):
        amp.backward(model[index].sum())
        assert amp.step().stepped
        assert model[index].item() == 0.5
