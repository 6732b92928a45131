"""Gradients that the loop computes by itself: first-order MAML, Reptile, evolution strategies."""

from __future__ import annotations

import copy

import pytest
import torch
from engine_loops import MODES, batch, loss_of, made, model_of, same, weights
from torch import nn

import ampguard
from ampguard.errors import ProtocolError


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def of_adapted_copy(model: nn.Module, number: int) -> list[torch.Tensor]:
    """First-order MAML: the gradients of a copy that has learnt for a step."""
    adapted = copy.deepcopy(model)
    inner = torch.optim.SGD(adapted.parameters(), 0.05)
    for part in (2 * number, 2 * number + 1):
        x, y = batch(part)
        inner.zero_grad()
        nn.functional.mse_loss(adapted(x), y).backward()
        if part % 2 == 0:
            inner.step()
    return [p.grad for p in adapted.parameters() if p.grad is not None]


@pytest.mark.parametrize("mode", ["fp32", "fp16", "bf16"])
def test_first_order_maml_is_plain_pytorchs(mode: str) -> None:
    model, truth = net(), net()
    optimizer, plain = (torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in (model, truth))
    amp = ampguard.Amp(model, optimizer, mode, max_grad_norm=1.0)
    for number in range(12):  # longer than the first steps, which are watched more closely
        amp.unscale_(optimizer)
        for p, gradient in zip(model.parameters(), of_adapted_copy(model, number), strict=True):
            p.grad = gradient
        result = amp.step()
        for p, gradient in zip(truth.parameters(), of_adapted_copy(truth, number), strict=True):
            p.grad = gradient
        norm = nn.utils.clip_grad_norm_(truth.parameters(), 1.0)
        plain.step()
        assert float(result.grad_norm) == pytest.approx(float(norm), rel=1e-5)
    torch.testing.assert_close(list(model.parameters()), list(truth.parameters()))


@pytest.mark.parametrize("mode", MODES)
def test_those_that_are_not_finite_are_skipped(mode: str) -> None:
    amp = made(mode)
    before = weights(amp)
    amp.unscale_()
    for group in amp.optimizers["AdamW"].param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, torch.nan)
    assert amp.step().skipped
    assert same(weights(amp), before)


def test_in_turns_with_losses() -> None:
    amp = made("fp16", max_grad_norm=torch.inf)
    count = sum(p.numel() for p in model_of(amp).parameters())
    for number in range(3):
        amp.unscale_()
        for p in model_of(amp).parameters():
            p.grad = torch.ones_like(p)
        assert float(amp.step().grad_norm) == pytest.approx(count**0.5)
        amp.backward(loss_of(amp, number))
        assert float(amp.step().grad_norm) < 20


def test_none_at_all_is_an_error_still() -> None:
    amp = made("fp16")
    amp.unscale_()
    with pytest.raises(ProtocolError, match="no-gradients"):
        amp.step()
