"""Hand-written backward passes that compute a forward pass once more and differentiate it (adjoints, reversible layers)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from watching import Watched

BAD = 3


class Rate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor([0.5, 0.2]))

    def forward(self, x: Tensor) -> Tensor:
        return -self.rate * x.abs() ** 0.5


class Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, *weights: Tensor) -> Tensor:
        ctx.module, ctx.states = module, [x]
        for _ in range(4):
            ctx.states.append(ctx.states[-1] + 0.05 * module(ctx.states[-1]))
        return ctx.states[-1]

    @staticmethod
    def backward(ctx: Any, adjoint: Tensor) -> Any:  # type: ignore[override]
        weights = list(ctx.module.parameters())
        sums = [torch.zeros_like(w) for w in weights]
        for state in reversed(ctx.states[:-1]):
            with torch.enable_grad():
                state = state.detach().requires_grad_()
                of_state, *of_weights = torch.autograd.grad(ctx.module(state), [state, *weights], adjoint)
            adjoint = adjoint + 0.05 * of_state
            sums = [s + 0.05 * g for s, g in zip(sums, of_weights, strict=True)]
        return adjoint, None, *sums


def train(bad: int | None) -> Callable[[], None]:
    def body() -> None:
        module, scale = Rate(), nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([*module.parameters(), scale], 1e-2)
        for step in range(BAD + 2):
            x = torch.rand(6, 2) + 1
            if step == bad:
                x[2, 1] = 0.0
            loss = (Adjoint.apply(x * scale, module, *module.parameters()) - 0.6 * x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return body


def test_the_line_is_that_of_the_forward_pass(guard: Callable[..., Watched]) -> None:
    run = guard(train(BAD))
    incident = run.first
    assert (incident.step, incident.cause, incident.evidence["derivative_of"]) == (
        BAD,
        "singular-gradient",
        "aten.pow.Tensor_Scalar",
    )
    assert incident.location is not None
    assert incident.location.code == "return -self.rate * x.abs() ** 0.5"
    assert [fix.verified for fix in incident.fixes] == [True, True]
    assert not run.faults


def test_nothing_is_said_of_a_healthy_one(guard: Callable[..., Watched]) -> None:
    assert guard(train(None)).report.status == "clean"
