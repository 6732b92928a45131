"""Tensors that a script updates by hand, beside an optimizer or without any: no loss scale is left in their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

TAKEN_BACK = "gave tensors that the script updates itself a gradient of 0 where the loss scale was too large"


def plain_tensors(steps: int = 12) -> list[Tensor]:
    """A network without modules and optimizers, as tutorials write it."""
    generator = torch.Generator().manual_seed(1)
    first = (torch.randn(8, 16, generator=generator) * 0.3).requires_grad_()
    second = (torch.randn(16, 1, generator=generator) * 0.3).requires_grad_()
    for _ in range(steps):
        x = torch.randn(32, 8, generator=generator)
        loss = ((torch.tanh(x @ first) @ second - x[:, :1]) ** 2).mean()
        loss.backward()
        with torch.no_grad():
            for weight in (first, second):
                weight -= 0.05 * weight.grad
                weight.grad = None
    return [first.detach(), second.detach()]


def perturbation(steps: int = 12) -> tuple[Tensor, Tensor]:
    """A perturbation and its multiplier, updated by hand beside a model with an optimizer."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    delta, multiplier = torch.zeros(1, 8, requires_grad=True), torch.tensor(1.0, requires_grad=True)
    for _ in range(steps):
        x = torch.randn(16, 8)
        loss = nn.functional.cross_entropy(model(x + delta), (x.sum(1) > 0).long())
        loss = loss + multiplier * (delta - 0.1).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            delta -= 0.1 * delta.grad
            multiplier -= 0.01 * multiplier.grad
        delta.grad = multiplier.grad = None
    return delta.detach(), multiplier.detach()


def updated_by_hand(size: float, steps: int = 20) -> nn.Module:
    """A model's parameters, updated in a loop over them."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    for _ in range(steps):
        x = torch.randn(16, 8)
        loss = ((model(x) * 0.1 - x[:, :1] * size) ** 2).mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 1e-4 * p.grad
    return model


@pytest.mark.parametrize("precision", ["fp16", "O2"])
def test_plain_tensors_learn_as_without_a_loss_scale(overridden: Callable[..., Any], precision: str) -> None:
    expected = plain_tensors()
    with overridden(precision) as session:
        weights = plain_tensors()
    assert "gained a dynamic loss scale" in session.report.run["did"]
    assert all(map(torch.equal, weights, expected))  # the scale is a power of two, and nothing here is float16
    assert session.report.incidents == ()


def test_tensors_beside_an_optimizer_get_no_loss_scale(overridden: Callable[..., Any]) -> None:
    delta, multiplier = perturbation()
    with overridden("fp16") as session:
        other_delta, other_multiplier = perturbation()
    torch.testing.assert_close(other_delta, delta, rtol=0.01, atol=1e-3)
    torch.testing.assert_close(other_multiplier, multiplier, rtol=0.01, atol=1e-3)
    assert session.report.incidents == ()


def test_an_update_by_hand_is_not_spoilt_by_the_loss_scale(overridden: Callable[..., Any]) -> None:
    with overridden("fp16") as session:
        model = updated_by_hand(size=300.0)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert TAKEN_BACK in session.report.run["did"]
    assert [(i.cause, i.severity) for i in session.report.incidents] == [("loss-scale-overflow", "info")]


def test_an_update_by_hand_that_fits_is_left_alone(overridden: Callable[..., Any]) -> None:
    expected = updated_by_hand(size=0.1)
    with overridden("fp16") as session:
        model = updated_by_hand(size=0.1)
    assert TAKEN_BACK not in session.report.run["did"]
    for p, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, other, rtol=0.01, atol=1e-4)


def test_what_is_not_finite_without_a_scale_is_left_as_it_is(overridden: Callable[..., Any]) -> None:
    weight = torch.ones(3, requires_grad=True)
    with overridden("fp16"):
        (weight - 1.0).abs().sqrt().sum().backward()  # its derivative is infinite
        gradient = weight.grad
        for _ in range(20):
            weight.grad = None
            (weight - 1.0).abs().sqrt().sum().backward()
    assert gradient is not None
    assert weight.grad is not None
    assert not bool(weight.grad.isfinite().any())


def test_rounded_weights_are_not_watched(overridden: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))  # its bias is a single number
    with overridden("bf16-true") as session:
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(8):
            x = torch.randn(8, 4)
            optimizer.zero_grad()
            (model(x) - x[:, :1]).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                (model(x) - 1).square().mean()
    assert session.report.run["could_not"] == []
    assert session.report.steps == 8
