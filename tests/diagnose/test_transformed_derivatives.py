"""Losses made of derivatives that transforms of torch.func take outside modules: told at what is differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from watching import Watched

BAD = 4
ROOT_LINE = "return (point * point).sum().sqrt() - 0.5 + net(point).squeeze()"
POWER_LINE = "return point.abs().pow(1.5).sum() + net(point).squeeze()"
QUOTIENT_LINE = "return gradient / (2 * root)"


class OwnRoot(torch.autograd.Function):
    """A root with a derivative of its own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sqrt()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        return gradient / (2 * root)


def distance(net: nn.Module, point: Tensor) -> Tensor:
    return (point * point).sum().sqrt() - 0.5 + net(point).squeeze()


def bent(net: nn.Module, point: Tensor) -> Tensor:
    return point.abs().pow(1.5).sum() + net(point).squeeze()


def own_distance(net: nn.Module, point: Tensor) -> Tensor:
    return OwnRoot.apply((point * point).sum()) + net(point).squeeze()


def second(of: Any, argnums: int) -> Any:
    return jacrev(jacrev(of, argnums), argnums)


def train(field: Callable[[nn.Module, Tensor], Tensor], derivative: Callable[..., Any]) -> Callable[[], None]:
    def body() -> None:
        net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        parameters = dict(net.named_parameters())

        def at(parameters: dict[str, Tensor], point: Tensor) -> Tensor:
            return field(lambda x: functional_call(net, parameters, (x,)), point)  # type: ignore[arg-type]

        for step in range(BAD + 2):
            points = torch.rand(6, 2) + 0.1
            if step == BAD:
                points[3] = 0.0
            slopes = vmap(derivative(at, argnums=1), (None, 0))(parameters, points)
            loss = (slopes.flatten(1).square().sum(1) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return body


@pytest.mark.parametrize(
    ("field", "derivative", "op", "line"),
    [
        (distance, grad, "aten.div.Tensor", ROOT_LINE),
        (distance, jacrev, "aten.div.Tensor", ROOT_LINE),
        (bent, second, "aten.pow.Tensor_Scalar", POWER_LINE),
    ],
)
def test_a_derivative_that_is_infinite(
    field: Any, derivative: Any, op: str, line: str, guard: Callable[..., Watched]
) -> None:
    """Where the derivative reads the operand itself (a power's), it is given what is put in its place."""
    run = guard(train(field, derivative))
    incident = run.report.incidents[0]
    assert (incident.step, incident.phase, incident.cause, incident.op) == (BAD, "backward", "singular-gradient", op)
    assert incident.location is not None
    assert incident.location.code == line
    assert [fix.verified for fix in incident.fixes] == [True, True]
    assert not run.faults


def test_a_derivative_of_the_scripts_own(guard: Callable[..., Watched]) -> None:
    run = guard(train(own_distance, grad))
    incident = run.report.incidents[0]
    assert (incident.step, incident.phase, incident.op) == (BAD, "backward", "aten.div.Tensor")
    assert incident.location is not None
    assert incident.location.code == QUOTIENT_LINE
    assert not run.faults
