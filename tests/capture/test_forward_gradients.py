"""Weights that a loop updates by the slope of its loss along a random direction: `torch.func.jvp`, and no backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from watching import Watched, bits

BAD = 5
STEPS = 8


def distance(of: nn.Module, weights: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
    apart = functional_call(of, weights, (a,)) - functional_call(of, weights, (b,))
    return apart.square().sum(1).sqrt().mean()


def train(bad: int | None) -> Callable[[], object]:
    def body() -> object:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        weights = {name: w.detach().clone() for name, w in net.named_parameters()}
        for step in range(STEPS):
            a, b = torch.randn(8, 4), torch.randn(8, 4)
            if step == bad:
                b[5] = a[5]
            directions = {name: torch.randn_like(w) for name, w in weights.items()}
            pair = (a, b)
            _, slope = jvp(lambda w, pair=pair: distance(net, w, *pair), (weights,), (directions,))
            weights = {name: w - 1e-2 * slope * directions[name] for name, w in weights.items()}
        return bits(weights)

    return body


def test_a_slope_that_is_not_finite(guard: Callable[..., Watched]) -> None:
    run = guard(train(BAD))
    incident = run.first
    assert run.report.steps == STEPS
    assert (incident.step, incident.cause, incident.phase) == (BAD, "singular-gradient", "backward")
    assert incident.location is not None
    assert incident.location.code == "return apart.square().sum(1).sqrt().mean()"
    assert incident.fixes[0].verified
    assert not run.faults


def test_a_healthy_loop(guard: Callable[..., Watched]) -> None:
    plain = train(None)()
    run = guard(train(None))
    assert (run.report.steps, run.report.status, run.faults) == (STEPS, "clean", 0)
    assert run.result == plain


def test_a_compiled_slope_is_one_graph_as_without_the_guard(guard: Callable[..., Watched]) -> None:
    """Dynamo knows the functions of forward mode by their names: none of them may be replaced."""

    def body() -> tuple[Tensor, Tensor]:
        def slope(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            value, along = jvp(lambda x: x.tanh().sum(), (x,), (v,))
            return value, along

        compiled = torch.compile(slope, backend="eager", fullgraph=True)
        return compiled(torch.ones(3), torch.ones(3))

    run = guard(body)
    assert run.report.status == "clean"
    torch.testing.assert_close(run.result[1], (1 - torch.ones(3).tanh().square()).sum())
