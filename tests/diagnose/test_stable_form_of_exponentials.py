"""Sums of exponentials that overflow under a logarithm: the stable form is differentiated as it will be written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampguard.diagnose.fixes import stable

Guard = Callable[..., Any]


def cumulated(risk: Tensor) -> Tensor:
    """Cox's partial likelihood: the sum over all that are at risk still."""
    hazard = torch.exp(risk)
    return (torch.log(torch.cumsum(hazard, 0)) - risk).mean()


def summed(risk: Tensor) -> Tensor:
    hazard = torch.exp(risk)
    return (torch.log(hazard.sum(0)) - risk).mean()


def averaged(risk: Tensor) -> Tensor:
    return (torch.log(torch.exp(risk).mean(0)) - risk).mean()


FORMS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], str]] = {
    "cumsum": (cumulated, lambda r: (torch.logcumsumexp(r, 0) - r).mean(), "torch.logcumsumexp(x, 0) in place of: "),
    "sum": (summed, lambda r: (torch.logsumexp(r, 0) - r).mean(), "torch.logsumexp(x, dim) in place of: "),
    "mean": (
        averaged,
        lambda r: (torch.logsumexp(r, 0) - 2.772588722 - r).mean(),
        "return ((torch.logsumexp(risk, 0) - math.log(risk.shape[0])) - risk).mean()",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_gradients_of_the_stable_form_are_its_own(name: str, guard: Guard) -> None:
    loss_of, stable_loss_of, how = FORMS[name]
    expected = []

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        for step in range(3):
            risk = net(torch.randn(16, 3)).squeeze(-1) * (300 if step == 2 else 1)
            if step == 2:
                expected.append(float(stable_loss_of(risk.detach())))
            loss = loss_of(risk)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    first = guard(body).first
    assert (first.cause, first.step, first.op) == ("overflow", 2, "aten.exp.default")
    fix = next(fix for fix in first.fixes if fix.action == "stable-form")
    assert fix.how.startswith(how)
    assert fix.verified, fix.outcome
    assert f"its gradients too; the loss is {expected[0]:.4g}" in str(fix.outcome)


def test_what_is_used_beside_the_form_is_differentiated_as_before(guard: Guard) -> None:
    """`p * p.log()`: the softmax goes into the product as well."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(3, 4)
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        for step in range(3):
            p = torch.softmax(net(torch.randn(16, 3)) * (1e4 if step == 2 else 1), -1)
            loss = -(p * p.log()).sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    first = guard(body).first
    assert (first.cause, first.step) == ("domain-error", 2)
    fix = next(fix for fix in first.fixes if fix.action == "stable-form")
    assert fix.verified, fix.outcome
    assert "its gradients too" in str(fix.outcome)


def test_both_ways_add_up_to_the_derivative() -> None:
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    softmax = torch.ops.aten._softmax.default
    source = stable._Source()
    form = stable._Stable(source, lambda operand, args: torch.log_softmax(operand, args[1]))
    p = source(softmax, (x.detach(), -1, False), {})
    logs = form(torch.ops.aten.log.default, (p,), {})
    assert torch.equal(form.derivative(torch.log, (p,), {}, p), torch.zeros_like(p))
    found = source.derivative(softmax, (x.detach(), -1, False), {}, logs)
    q = torch.softmax(x, -1)
    (q * q.log()).sum().backward()
    assert x.grad is not None
    assert torch.allclose(found, x.grad)


def softmax_by_hand(x: Tensor) -> Tensor:
    e = torch.exp(x)
    return e / e.sum(-1, keepdim=True)


def test_a_softmax_by_hand_that_only_the_derivative_sees(guard: Guard) -> None:
    """The probability that the loss picks is a finite number over infinity: 0."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(3, 4)
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        for step in range(3):
            scores = net(torch.randn(1, 3))
            if step == 2:
                scores = scores + torch.tensor([0.0, 0.0, 200.0, 0.0])
            loss = -torch.log(softmax_by_hand(scores)[:, 0] + 1e-8).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    first = guard(body).first
    assert (first.cause, first.step, first.evidence["hidden"]) == ("singular-gradient", 2, True)
    assert first.fixes[0].verified
    assert first.fixes[0].how == (
        "torch.softmax(x, dim) in place of: e = torch.exp(x); return e / e.sum(-1, keepdim=True)\n# x is what exp is given"
    )
