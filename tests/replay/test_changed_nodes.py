"""The derivative of a changed operator is the derivative of the change: against autograd's own of the same code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ampguard.replay.tracer import ReplayMode
from ampguard.replay.variants import Intervention, Variant

aten = torch.ops.aten


def clamped(position: int = 0, low: float = 0.5) -> Intervention:
    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args[:position], args[position].clamp(min=low), *args[position + 1 :], **kwargs)

    return run


def gradients(code: Callable[[Tensor, Tensor], Tensor], change: tuple[Any, Intervention] | None = None) -> list[Tensor]:
    x = torch.linspace(-1, 2, 7, dtype=torch.float64, requires_grad=True)
    w = torch.linspace(0.2, 1.4, 7, dtype=torch.float64, requires_grad=True)
    at = {(str(change[0]), None, None): change[1]} if change is not None else {}
    mode = ReplayMode(Variant(at_places=at), None, {})
    with mode:
        loss = code(x, w)
    with mode.differentiating(gradients.__code__):
        found = torch.autograd.grad(loss, [x, w])
    assert mode.changed_nodes.are_known
    return list(found)


def quotient(y: Tensor, low: float | None) -> Tensor:
    divisor = y.exp()
    return (y / (divisor if low is None else divisor.clamp(min=low))).sum()


def written(x: Tensor, by: Tensor) -> Tensor:
    y = x * 1.0
    y.div_(by)
    return y


CASES = {
    "what is bounded has no derivative": (
        aten.log.default,
        clamped(),
        lambda x, w: (x * w).log().sum(),
        lambda x, w: (x * w).clamp(min=0.5).log().sum(),
    ),
    "an operator that keeps its result": (
        aten.sqrt.default,
        clamped(),
        lambda x, w: ((x * w).sqrt() * w).sum(),
        lambda x, w: ((x * w).clamp(min=0.5).sqrt() * w).sum(),
    ),
    "a number in place of another": (
        aten.var.correction,
        lambda f, a, k: f(*a, **{**k, "correction": 0}),
        lambda x, w: (x * w).var(),
        lambda x, w: (x * w).var(correction=0),
    ),
    "the second of two operands": (
        aten.div.Tensor,
        clamped(1),
        lambda x, w: (w / (x * x)).sum(),
        lambda x, w: (w / (x * x).clamp(min=0.5)).sum(),
    ),
    "one operand made of the other": (
        aten.div.Tensor,
        clamped(1),
        lambda x, w: quotient(x * w, None),
        lambda x, w: quotient(x * w, 0.5),
    ),
    "the same operand twice": (
        aten.mul.Tensor,
        lambda f, a, k: f(a[0].clamp(max=1.0), a[1].clamp(max=1.0)),
        lambda x, w: (x * x).sum() + w.sum(),
        lambda x, w: x.clamp(max=1.0).square().sum() + w.sum(),
    ),
    "a leaf itself": (
        aten.exp.default,
        lambda f, a, k: f(a[0].clamp(max=1.0)),
        lambda x, w: x.exp().sum() + w.sum(),
        lambda x, w: x.clamp(max=1.0).exp().sum() + w.sum(),
    ),
    "a result": (
        aten.log.default,
        lambda f, a, k: f(*a, **k).clamp(min=-1.0),
        lambda x, w: (x.square() * w + 1e-3).log().sum(),
        lambda x, w: (x.square() * w + 1e-3).log().clamp(min=-1.0).sum(),
    ),
    "one of several results": (
        aten.var_mean.correction,
        lambda f, a, k: f(a[0].clamp(min=0.5), *a[1:], **k),
        lambda x, w: sum(torch.var_mean(x * w)),
        lambda x, w: sum(torch.var_mean((x * w).clamp(min=0.5))),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_derivative_of_the_change(name: str) -> None:
    operator, change, code, changed = CASES[name]
    for found, expected in zip(gradients(code, (operator, change)), gradients(changed), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_operator_that_writes() -> None:
    def below(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(args[0], args[1].clamp(min=0.5))

    found = gradients(lambda x, w: written(w, x).sum(), (aten.div_.Tensor, below))
    expected = gradients(lambda x, w: written(w, x.clamp(min=0.5)).sum())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_operator_that_writes_to_a_view() -> None:
    def below(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0].copy_(func(args[0].clamp(min=0.5)))

    def code(x: Tensor, w: Tensor, low: float | None) -> Tensor:
        y = (x * w).expand(3, 7).clone().t()
        part = y[2:, 1:]
        if low is not None:
            part.clamp_(min=low)
        part.sqrt_()
        return (y[:, 1] * w).sum() + y[:, 0].sum()

    found = gradients(lambda x, w: code(x, w, None), (aten.sqrt_.default, below))
    for one, other in zip(found, gradients(lambda x, w: code(x, w, 0.5)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_divisor_of_a_view() -> None:
    def below(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(args[0], args[1].clamp(min=0.5))

    def code(x: Tensor, w: Tensor, low: float | None) -> Tensor:
        y = torch.zeros(2, 7, dtype=torch.float64) + w
        y[1] /= x if low is None else x.clamp(min=low)
        return (y * w).sum()

    found = gradients(lambda x, w: code(x, w, None), (aten.div_.Tensor, below))
    for one, other in zip(found, gradients(lambda x, w: code(x, w, 0.5)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_derivative_of_a_derivative() -> None:
    def penalty(x: Tensor, w: Tensor, low: float | None) -> Tensor:
        inner = x.square() * w
        root = (inner if low is None else inner.clamp(min=low)).sqrt().sum()
        (slope,) = torch.autograd.grad(root, x, create_graph=True)
        return slope.square().sum()

    found = gradients(lambda x, w: penalty(x, w, None), (aten.sqrt.default, clamped(low=0.3)))
    expected = gradients(lambda x, w: penalty(x, w, 0.3))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_healthy_operators_stay_as_they_are() -> None:
    code = CASES["an operator that keeps its result"][2]
    positive = lambda x, w: code(x.abs() + 1, w)  # noqa: E731
    for one, other in zip(gradients(positive, (aten.log.default, clamped())), gradients(positive), strict=True):
        assert torch.equal(one, other)
