"""A number that the script prints as a tensor, or gives to NumPy or a list, and reads in no other way."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor, nn
from watching import Watched


def evaluate(show: Callable[[Tensor], str], spread: float) -> list[str]:
    model = nn.Linear(4, 2).eval()
    with torch.no_grad():
        error = (model(torch.randn(8, 4)) - 1).square().mean()
        return [show(error / torch.full((8,), spread).square().mean())]


@pytest.mark.parametrize("show", [repr, str, lambda value: str({"r2": value}), "{}".format])
def test_printed(show: Callable[[Tensor], str], guard: Callable[..., Watched]) -> None:
    run = guard(lambda: evaluate(show, 0.0))
    assert [(i.mode, i.cause) for i in run.report.incidents] == [("eval", "division-by-zero")]
    assert "inf" in run.result[0]
    assert not run.faults


READS = (lambda v: v.cpu().numpy(), lambda v: v.tolist(), numpy.asarray, lambda v: numpy.mean([v]))


@pytest.mark.parametrize("read", READS)
def test_converted(read: Callable[[Tensor], object], guard: Callable[..., Watched]) -> None:
    run = guard(lambda: evaluate(lambda value: str(read(value)), 0.0))
    assert [(i.mode, i.cause) for i in run.report.incidents] == [("eval", "division-by-zero")]
    assert run.result == ["inf"]
    assert not run.faults


def test_array_with_gaps_is_meant(guard: Callable[..., Watched]) -> None:
    """Classes that do not occur have no accuracy, and `nanmean` leaves them out."""

    def body() -> list[str]:
        model = nn.Linear(4, 2).eval()
        with torch.no_grad():
            hits = (model(torch.randn(8, 4)) > 0).sum(0) / torch.tensor([8, 0])
            return [str(numpy.nanmean(hits.numpy())), str(hits.tolist())]

    assert guard(body).report.incidents == ()


def test_compiled_code_converts_as_without_the_guard(guard: Callable[..., Watched]) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    def halved(x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() / 2) + x

    def body() -> Tensor:
        torch._dynamo.reset()
        return torch.compile(halved, backend=backend)(torch.ones(3))

    assert torch.equal(guard(body).result, body())
    assert len(graphs) == 2


def test_finite(guard: Callable[..., Watched]) -> None:
    shown = torch.Tensor.__repr__
    run = guard(lambda: evaluate(repr, 1.0))
    assert run.report.incidents == ()
    assert torch.Tensor.__repr__ is shown
