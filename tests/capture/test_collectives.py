"""Collectives of the script's own: called as ever, and a fault of ours in what is kept of them does no harm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ampguard
from ampguard.capture.ranks import collectives, summed
from ampguard.report.store import read_report


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def loss_of(z: Tensor) -> Tensor:
    rows = [torch.empty_like(z)]
    handle = dist.all_gather(rows, z.detach(), async_op=True)
    handle.wait()
    with torch.no_grad():
        total = z.exp().sum(0)
        dist.all_reduce(tensor=total, op=dist.ReduceOp.SUM)
        largest = z.abs().max()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return ((z / largest) @ rows[0].t()).square().mean() + (z.exp() / total).mean()


def train(growth: float = 1.0) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        x = torch.randn(3, 4) * (growth if step == 2 else 1.0)
        optimizer.zero_grad()
        loss_of(model(x)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("growth", [1.0, 1e3])
def test_training_is_left_alone(growth: float, tmp_path: Any) -> None:
    before = dist.all_reduce
    expected = train(growth)
    with ampguard.watch(out=tmp_path / "run"):
        found = train(growth)
    assert same(expected, found)
    assert dist.all_reduce is before
    report = read_report(tmp_path / "run")
    assert [(i.cause, i.op, i.step) for i in report.incidents[:1]] == (
        [("overflow", "aten.exp.default", 2)] if growth > 1 else []
    )


@pytest.mark.parametrize(
    ("owner", "name"),
    [(collectives.Collectives, "before"), (collectives.Collectives, "after"), (summed.SummedUp, "became")],
)
def test_a_fault_of_ours_does_no_harm(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    expected = train()

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("a fault of ours")

    monkeypatch.setattr(owner, name, fails)
    with ampguard.watch(out=tmp_path / "run"):
        found = train()
    assert same(expected, found)
    assert capsys.readouterr().err.count("a fault of its own") == 1


def test_without_a_group_pytorchs_own_error_comes(tmp_path: Any) -> None:
    dist.destroy_process_group()
    try:
        with ampguard.watch(out=tmp_path / "run"), pytest.raises(ValueError, match="process group"):
            dist.all_gather([torch.ones(2)], torch.ones(2))
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_compiled_functions_keep_their_one_graph(tmp_path: Any) -> None:
    """Dynamo follows us to its own function, and puts the collective into the graph."""

    def graphs() -> tuple[int, int]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = nn.Linear(4, 4)

        @torch.compile(backend="aot_eager")
        def loss(x: Tensor) -> Tensor:
            z = model(x)
            total = z.detach().exp().sum(0)
            dist.all_reduce(total)
            return (z.exp() / total).square().sum()

        for _ in range(3):
            loss(torch.randn(3, 4)).backward()
        counters = torch._dynamo.utils.counters
        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

    expected = graphs()
    with ampguard.watch(out=tmp_path / "run"):
        assert graphs() == expected
    assert expected == (1, 0)
