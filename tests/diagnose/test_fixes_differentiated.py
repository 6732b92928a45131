"""Fixes of a failing loss in training: verified only where the gradients are finite too, by the changed code's own derivative."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, seed_everything

from ampguard.incident import Fix, Incident

Guard = Callable[..., Watched]
BAD = 2

Features = Callable[[Tensor, bool], Tensor]


def first_of(guard: Guard, loss: Callable[[nn.Module, bool], Tensor]) -> Incident:
    def body() -> None:
        seed_everything()
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(BAD + 1):
            optimizer.zero_grad()
            loss(model, step == BAD).backward()
            optimizer.step()

    return guard(body).first


def fix_of(incident: Incident, action: str) -> Fix:
    return next(fix for fix in incident.fixes if fix.action == action)


def silenced(x: Tensor, is_bad: bool) -> Tensor:
    return x * 0 if is_bad else x


def test_bound_behind_an_absorbed_infinity(guard: Guard) -> None:
    """exp takes log's -Inf away in the forward pass; the derivative of that log is still 1 / 0."""

    def loss(model: nn.Module, is_bad: bool) -> Tensor:
        x = silenced(model(torch.ones(5, 4)), is_bad)
        pooled = x.abs().log().mean(0).exp()
        return pooled.log().square().mean()

    first = first_of(guard, loss)
    cures, rest = first.fixes[0], first.fixes[1:]
    code, _, place = cures.how.partition("  # ")
    assert (cures.verified, code) == (True, "pooled = (x.abs() + 1e-6).log().mean(0).exp()")
    assert place.startswith("test_fixes_differentiated.py:")
    assert "its gradients too" in str(cures.outcome)
    assert rest
    assert all(fix.verified is False and "its gradients are not" in str(fix.outcome) for fix in rest)


def test_bound_before_a_logarithm(guard: Guard) -> None:
    """log at the bound has a derivative of 1e6, that of the bound itself is 0: the gradients are finite."""

    def loss(model: nn.Module, is_bad: bool) -> Tensor:
        x = silenced(model(torch.ones(5, 4)), is_bad).square()
        return (x.log() * 1e35).mean() * 1e-35

    fix = fix_of(first_of(guard, loss), "clamp")
    assert fix.verified is True
    assert "its gradients too" in str(fix.outcome)


@pytest.mark.filterwarnings("ignore:var")
def test_another_correction(guard: Guard) -> None:
    """The variance of one value is 0 / 0 with `correction=1`; with 0 it is 0, and so is its derivative."""

    def loss(model: nn.Module, is_bad: bool) -> Tensor:
        x = model(torch.ones(1 if is_bad else 5, 4))
        return x.var(0).mean() + x.square().mean()

    first = first_of(guard, loss)
    assert first.fixes[0].verified is True
    assert "its gradients too" in str(first.fixes[0].outcome)


@pytest.mark.parametrize("spelled", ["sqrt", "norm"])
def test_root_in_the_divisor(guard: Guard, spelled: str) -> None:
    """An epsilon beside the root leaves its derivative at 0."""

    def loss(model: nn.Module, is_bad: bool) -> Tensor:
        x = silenced(model(torch.ones(5, 4)), is_bad)
        length = x.square().sum(-1, keepdim=True).sqrt() if spelled == "sqrt" else x.norm(dim=-1, keepdim=True)
        return (x / length).sum()

    fixes = first_of(guard, loss).fixes
    assert any(fix.verified for fix in fixes)
    if spelled == "sqrt":
        assert not any(fix.verified and "(length + " in fix.how for fix in fixes)


def test_in_place_division(guard: Guard) -> None:
    def loss(model: nn.Module, is_bad: bool) -> Tensor:
        x = model(torch.ones(5, 4)).exp()
        total = (x * (0.0 if is_bad else 1.0)).sum(-1, keepdim=True)
        x = x * 1.0
        x /= total
        return x.mean()

    fix = fix_of(first_of(guard, loss), "add-epsilon")
    assert fix.verified is True
    assert "its gradients too" in str(fix.outcome)


def test_module_of_the_scripts_own(guard: Guard) -> None:
    class Entropy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor, is_bad: bool) -> Tensor:
            p = silenced(F.softmax(self.layer(x), -1), is_bad)
            return -(p * p.log()).sum(-1).mean()

    def body() -> None:
        seed_everything()
        model = Entropy()
        for step in range(BAD + 1):
            model(torch.ones(2, 4), step == BAD).backward()

    first = guard(body).first
    assert first.fixes[0].verified is True
    assert all("its gradients" in str(fix.outcome) for fix in first.fixes if fix.verified is not None)


def test_line_behind_the_one_that_fails_in_low_precision(guard: Guard) -> None:
    """An epsilon in the divisor cures the quotient; the root of 0 behind it needs one of its own."""

    def loss(model: nn.Module, is_bad: bool) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            x = model(torch.ones(5, 4)) * (1e-5 if is_bad else 1.0)
            length = x.half().pow(2).sum(-1, keepdim=True).sqrt()
            return (x.half() / (length + 1e-8)).float().square().mean()

    first = first_of(guard, loss)
    assert first.cause == "fp16-underflow"
    epsilons = [fix for fix in first.fixes if fix.action == "add-epsilon"]
    assert [fix.verified for fix in epsilons] == [True, False]
    assert epsilons[0].how.startswith("length = (x.half().pow(2).sum(-1, keepdim=True) + 0.001).sqrt()  # ")


def test_root_written_to_a_part_of_a_tensor(guard: Guard) -> None:
    """Autograd gives an operator that writes to a view a node of another kind: the line is that of the operator still."""

    def loss(model: nn.Module, is_bad: bool) -> Tensor:
        x = silenced(model(torch.ones(5, 4)), is_bad)
        parts = torch.ones(5, 6)
        parts[:, :3] = x.square()
        parts[:, :3].sqrt_()
        return parts.sum()

    first = first_of(guard, loss)
    assert (first.cause, first.phase) == ("singular-gradient", "backward")
    assert first.location is not None
    assert first.location.code == "parts[:, :3].sqrt_()"
    assert (first.fixes[0].verified, first.fixes[0].how) == (True, "parts[:, :3].add_(1e-6).sqrt_()")


def test_gradients_that_only_the_scripts_own_scale_makes_infinite(guard: Guard) -> None:
    """A float16 loss times 65536: in float32 the product is a number, and the gradient that arrives at the loss is none."""

    def body() -> None:
        seed_everything()
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = (model(torch.randn(8, 8)) - 40).square().mean()
            scaled = loss * 65536.0
            optimizer.zero_grad()
            scaled.backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.div_(65536.0)
            optimizer.step()

    first = guard(body).first
    assert (first.cause, first.step) == ("fp16-overflow", 0)
    product, *others = reversed(first.fixes)
    assert (product.action, product.verified) == ("force-fp32", True)
    assert str(product.outcome).endswith(
        "at the script's own loss scale of 65536 its gradients are not: lower that as well"
    )
    assert others
    assert not any("loss scale" in str(fix.outcome) for fix in others)
