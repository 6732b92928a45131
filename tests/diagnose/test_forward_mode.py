"""Derivatives in forward mode (`jvp`, `jacfwd`, `hessian`, dual numbers): told at what is differentiated, as any other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as fwAD  # noqa: N812
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jvp, vmap
from watching import Watched

BAD = 4
Guard = Callable[..., Watched]
Derivative = Callable[[nn.Module, Tensor], Tensor]


def root(x: Tensor) -> Tensor:
    return x.pow(2).sum(-1, keepdim=True).sqrt()


def arc(x: Tensor) -> Tensor:
    return torch.acos(1 - x.square().clamp(max=1))


def power(x: Tensor) -> Tensor:
    return x.abs() ** 0.5


def along(field: Callable[[Tensor], Tensor]) -> Derivative:
    return lambda net, x: jvp(lambda x: net(x) + field(x).sum(), (x,), (torch.ones_like(x),))[1]


def jacobian(field: Callable[[Tensor], Tensor]) -> Derivative:
    return lambda net, x: vmap(jacfwd(lambda x: net(x) + field(x).sum()))(x)


def curvature(field: Callable[[Tensor], Tensor]) -> Derivative:
    def of(net: nn.Module, x: Tensor) -> Tensor:
        weights = dict(net.named_parameters())
        at = hessian(lambda w, x: (functional_call(net, w, (x,)) * field(x)).sum(), argnums=1)
        return vmap(at, (None, 0))(weights, x)

    return of


def dual(field: Callable[[Tensor], Tensor]) -> Derivative:
    def of(net: nn.Module, x: Tensor) -> Tensor:
        with fwAD.dual_level():
            value, slope = fwAD.unpack_dual(field(fwAD.make_dual(x, torch.ones_like(x))))
        return net(x) * value.mean() - slope

    return of


class Along(nn.Module):
    """Takes the derivative in its own forward pass."""

    def __init__(self, net: nn.Module, field: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.derivative = net, along(field)

    def forward(self, x: Tensor) -> Tensor:
        return self.derivative(self.net, x)


def train(derivative: Derivative, in_module: Callable[[Tensor], Tensor] | None = None) -> Callable[[], None]:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        model = Along(net, in_module) if in_module is not None else None
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        for step in range(BAD + 3):
            x = torch.rand(6, 2) * 0.8 + 0.1
            if step == BAD:
                x[3] = 0.0
            loss = (model(x) if model is not None else derivative(net, x)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return body


@pytest.mark.parametrize(
    ("derivative", "line"),
    [
        (along(root), "return x.pow(2).sum(-1, keepdim=True).sqrt()"),
        (jacobian(arc), "return torch.acos(1 - x.square().clamp(max=1))"),
        (curvature(root), "return x.pow(2).sum(-1, keepdim=True).sqrt()"),
        (dual(power), "return x.abs() ** 0.5"),
    ],
    ids=["jvp", "jacfwd", "hessian", "dual numbers"],
)
def test_a_derivative_that_is_infinite(derivative: Derivative, line: str, guard: Guard) -> None:
    run = guard(train(derivative))
    incident = run.first
    assert (incident.step, incident.cause, incident.phase) == (BAD, "singular-gradient", "backward")
    assert incident.location is not None
    assert incident.location.code == line
    assert "in forward mode" in incident.explanation
    assert incident.fixes[0].verified
    assert not run.faults


def test_a_derivative_that_a_module_takes(guard: Guard) -> None:
    run = guard(train(along(power), in_module=power))
    incident = run.first
    assert (incident.step, incident.cause) == (BAD, "singular-gradient")
    assert incident.location is not None
    assert incident.location.code == "return x.abs() ** 0.5"
    assert [fix.verified for fix in incident.fixes] == [True, True]
    assert not run.faults


def log(x: Tensor) -> Tensor:
    return torch.log(x)


def both(net: nn.Module, x: Tensor) -> Tensor:
    value, slope = jvp(lambda x: net(x) + log(x).sum(), (x,), (torch.ones_like(x),))
    return value + slope


@pytest.mark.parametrize(
    ("derivative", "cause", "op"),
    [(along(log), "singular-gradient", "aten.div.Tensor"), (both, "domain-error", "aten.log.default")],
    ids=["the derivative alone", "the value too"],
)
def test_a_value_that_is_bad_itself(derivative: Derivative, cause: str, op: str, guard: Guard) -> None:
    """A fix is tried with both: what computes the tangent is given the changed operand as well."""
    incident = guard(train(derivative)).first
    assert (incident.step, incident.cause, incident.op) == (BAD, cause, op)
    assert incident.fixes[0].verified


def test_an_infinite_derivative_that_is_left_out(guard: Guard) -> None:
    def kept(net: nn.Module, x: Tensor) -> Tensor:
        slope = jvp(lambda x: power(x), (x,), (torch.ones_like(x),))[1]
        return net(x) - torch.where(slope.isfinite(), slope, torch.zeros_like(slope))

    run = guard(train(kept))
    assert run.report.status == "clean"
    assert not run.faults


def test_a_second_derivative_over_a_first(guard: Guard) -> None:
    """Forward over reverse: the factor of the second derivative reads the operand of the first."""

    def of(net: nn.Module, x: Tensor) -> Tensor:
        weights = dict(net.named_parameters())
        aim = functional_call(net, weights, (x,)).detach() * x.sign().abs().amin(-1, keepdim=True).logical_not()

        def loss(w: dict[str, Tensor]) -> Tensor:
            return ((functional_call(net, w, (x,)) - aim).abs() ** 1.5).mean()

        directions = {name: torch.ones_like(w) for name, w in weights.items()}
        curved = jvp(grad(loss), (weights,), (directions,))[1]
        return loss(weights) + sum(c.sum() for c in curved.values())

    incident = guard(train(of)).first
    assert (incident.step, incident.cause) == (BAD, "singular-gradient")
    assert incident.location is not None
    assert incident.location.code.endswith("- aim).abs() ** 1.5).mean()")
    assert incident.fixes[0].verified
