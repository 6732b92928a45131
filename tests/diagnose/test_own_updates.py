"""Updates that a script writes itself, with gradients of a scaled loss: divided by the scale or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
SCALE = 512.0


def plainly(parameters: Iterable[Tensor], scaler: Any) -> None:
    with torch.no_grad():
        for p in parameters:
            p -= 0.01 * p.grad  # update


def past_autograd(parameters: Iterable[Tensor], scaler: Any) -> None:
    for p in parameters:
        p.data.add_(p.grad.data, alpha=-0.0025)  # update


def written_anew(parameters: Iterable[Tensor], scaler: Any) -> None:
    with torch.no_grad():
        for p in parameters:
            p.copy_(p - 3e-4 * p.grad)  # update


def divided(parameters: Iterable[Tensor], scaler: Any) -> None:
    with torch.no_grad():
        for p in parameters:
            p -= 0.01 * (p.grad / scaler.get_scale())


def divided_by_a_constant(parameters: Iterable[Tensor], scaler: Any) -> None:
    with torch.no_grad():
        for p in parameters:
            p -= (0.01 / SCALE) * p.grad


def divided_in_place(parameters: Iterable[Tensor], scaler: Any) -> None:
    with torch.no_grad():
        for p in parameters:
            p.grad.mul_(1.0 / SCALE)
            p.add_(p.grad, alpha=-0.01)


def normalised(parameters: Iterable[Tensor], scaler: Any) -> None:
    """A step of fixed length: the scale cancels."""
    with torch.no_grad():
        for p in parameters:
            p -= 0.01 * p.grad / p.grad.norm()


def decayed_only(parameters: Iterable[Tensor], scaler: Any) -> None:
    with torch.no_grad():
        for p in parameters:
            p.mul_(0.999)


def training(update: Callable[[Iterable[Tensor], Any], None], beside_optimizer: bool) -> Callable[[], None]:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 5))
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        opt = torch.optim.Adam(model[2].parameters(), 1e-3)
        own = model[0] if beside_optimizer else model
        for _ in range(6):
            x = torch.randn(8, 5)
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(x)
            model.zero_grad()
            scaler.scale((out.float() - x).square().mean()).backward()
            update(own.parameters(), scaler)
            if beside_optimizer:
                scaler.step(opt)
                scaler.update()

    return body


@pytest.mark.parametrize("update", [plainly, past_autograd, written_anew])
def test_an_update_with_scaled_gradients(update: Callable[..., None], guard: Guard) -> None:
    run = guard(training(update, beside_optimizer=True))
    assert (run.faults, run.causes) == (0, ["bypassed-scaler"])
    incident = run.first
    assert (incident.step, incident.module, incident.evidence["factor"]) == (0, "0", SCALE)
    assert incident.evidence["parameters"] == ["0.weight", "0.bias"]
    assert incident.location is not None
    assert incident.location.code.endswith("# update")


@pytest.mark.parametrize("update", [divided, divided_by_a_constant, divided_in_place, normalised, decayed_only])
def test_an_update_with_true_gradients_is_right(update: Callable[..., None], guard: Guard) -> None:
    run = guard(training(update, beside_optimizer=True))
    assert (run.faults, run.causes) == (0, [])


def test_where_no_optimizer_steps_at_all(guard: Guard) -> None:
    run = guard(training(written_anew, beside_optimizer=False))
    assert (run.faults, run.causes) == (0, ["bypassed-scaler"])
    assert run.first.evidence["parameters"] == ["0.weight", "0.bias"]  # the rest an optimizer holds


@pytest.mark.parametrize("in_module", [True, False])
@pytest.mark.parametrize("divides", [True, False])
def test_along_what_autograd_grad_returns(in_module: bool, divides: bool, guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        layer = nn.Linear(5, 5)
        weights = list(layer.parameters()) if in_module else [torch.randn(5, 5).requires_grad_()]
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        for _ in range(6):
            x = torch.randn(8, 5)
            with torch.autocast("cpu", dtype=torch.float16):
                out = layer(x) if in_module else x @ weights[0]
            gradients = torch.autograd.grad(scaler.scale((out.float() - x).square().mean()), weights)
            with torch.no_grad():
                for w, g in zip(weights, gradients, strict=True):
                    w -= 0.01 * (g / scaler.get_scale() if divides else g)  # update

    run = guard(body)
    assert run.faults == 0
    if divides:
        assert run.causes == []
    else:
        assert run.causes == ["bypassed-scaler"]
        assert (run.first.step, run.first.evidence["factor"]) == (0, SCALE)
        assert run.first.location is not None
        assert run.first.location.code.endswith("# update")


class Prompted(nn.Module):
    """Takes what is learned beside its weights as an input."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 5))

    def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
        return self.body(x + prompt)


def in_sign(parameters: Iterable[Tensor], scaler: Any) -> None:
    """As an attack does: the scale cancels."""
    with torch.no_grad():
        for p in parameters:
            p += 0.01 * p.grad.sign()


@pytest.mark.parametrize("is_behind", [True, False])
@pytest.mark.parametrize("update", [plainly, past_autograd, divided, divided_by_a_constant, normalised, in_sign])
def test_an_input_that_is_learned(update: Callable[..., None], is_behind: bool, guard: Guard) -> None:
    """Before the optimizer beside it has stepped, or behind it."""

    def body() -> None:
        torch.manual_seed(0)
        model, prompt = Prompted(), torch.randn(8, 5, requires_grad=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        opt = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(6):
            x = torch.randn(8, 5)
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(x, prompt)
            opt.zero_grad()
            prompt.grad = None
            scaler.scale((out.float() - x).square().mean()).backward()
            if not is_behind:
                update([prompt], scaler)
            scaler.step(opt)
            if is_behind:
                update([prompt], scaler)
            scaler.update()

    run = guard(body)
    is_wrong = update in (plainly, past_autograd)
    assert (run.faults, run.causes) == (0, ["bypassed-scaler"] if is_wrong else [])
    if is_wrong:
        assert (run.first.step, run.first.evidence["factor"]) == (0, SCALE)
