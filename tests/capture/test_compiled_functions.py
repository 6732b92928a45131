"""Compiled functions outside modules are recorded as calls, and a failing one is explained by running it eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from watching import fingerprint

from ampguard.incident import Report

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def objective(out: Tensor, y: Tensor) -> Tensor:
    spread = torch.exp(out.abs() * 10)
    return functional.cross_entropy(out, y) + 1e-9 * spread.mean()


def train(compiled: Callable[[nn.Module], Callable[..., Tensor]]) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    loss_of = compiled(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for step in range(4):
        x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
        with torch.no_grad():
            net[2].weight.mul_(1.0 if step < 3 else 20.0)
        loss = loss_of(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return fingerprint(net, optimizer)


def of_outputs(net: nn.Module) -> Callable[..., Tensor]:
    compiled = torch.compile(objective, backend="aot_eager")
    return lambda x, y: compiled(net(x), y)


def of_model(net: nn.Module) -> Callable[..., Tensor]:
    @torch.compile(backend="aot_eager")
    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return objective(net(x), y)

    return loss_of


@pytest.mark.parametrize("compiled", [of_outputs, of_model])
def test_failing_function_is_explained_by_its_own_line(
    guarded: Callable[..., tuple[Any, Report]], compiled: Callable[..., Any]
) -> None:
    plain = train(compiled)
    torch._dynamo.reset()
    result, report = guarded(lambda: train(compiled))
    assert result == plain
    assert [incident.cause for incident in report.incidents] == ["overflow"]
    first = report.incidents[0]
    assert (first.step, first.mode, first.op) == (3, "train", "aten.exp.default")
    assert first.module is None
    assert first.phase == "loss"
    assert first.location is not None
    assert first.location.code == "spread = torch.exp(out.abs() * 10)"
    assert any(fix.verified for fix in first.fixes)


def test_whole_training_step_is_left_alone(guarded: Callable[..., tuple[Any, Report]]) -> None:
    """Its backward pass and its update are seen by themselves, and Dynamo compiles none of what sees them."""
    from torch._dynamo.utils import counters

    def body() -> Any:
        counters.clear()
        torch.manual_seed(0)
        net = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)

        @torch.compile(backend="aot_eager")
        def step(x: Tensor) -> Tensor:
            loss = (net(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        for _ in range(3):
            step(torch.randn(8, 4))
        return fingerprint(net), counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

    plain = body()
    torch._dynamo.reset()
    result, report = guarded(body)
    assert result[:2] == plain[:2]
    assert result[2] <= plain[2]
    assert report.incidents == ()
    assert report.steps == 3


def test_module_is_traced_as_without_guard(guarded: Callable[..., tuple[Any, Report]]) -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(x) * 3)

    def body() -> Tensor:
        torch.manual_seed(0)
        traced = torch.jit.trace(Gate(), torch.randn(2, 4))  # compares two traces
        return traced(torch.ones(1, 4)).tolist()

    assert guarded(body)[0] == body()


def test_compiled_function_inside_another_adds_no_break(guarded: Callable[..., tuple[Any, Report]]) -> None:
    from torch._dynamo.utils import counters

    def body() -> Any:
        torch._dynamo.reset()
        counters.clear()
        inner = torch.compile(lambda x: x.sin(), backend="eager")
        outer = torch.compile(lambda x: inner(x).cos().sum(), backend="eager")
        for _ in range(3):
            outer(torch.ones(3, requires_grad=True)).backward()
        return dict(counters["graph_break"]), counters["stats"]["unique_graphs"]

    plain = body()
    assert guarded(body)[0] == plain
