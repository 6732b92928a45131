"""Rows of an input that cannot be left out, and samples that can: it is not advised to drop the nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
ROWS, BAD = 24, 5


class Layer(nn.Module):
    """Sums over neighbours as `gather` does, then mixes features."""

    def __init__(self, gather: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 3)
        self._gather = gather

    def forward(self, x: Tensor, beside: Any = None) -> Tensor:
        return self._gather(self.mix(x), beside)


def by_edges(x: Tensor, edges: Tensor) -> Tensor:
    source, target = edges
    return torch.zeros_like(x).index_add(0, target, x[source])


def train(gather: Callable[[Tensor, Any], Tensor], beside: Any) -> None:
    torch.manual_seed(0)
    features, labels = torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,))
    features[BAD, 2] = float("nan")
    net = Layer(gather)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    for _ in range(2):
        loss = nn.functional.cross_entropy(net(features, beside), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def ring() -> Tensor:
    """The adjacency matrix of nodes in a ring."""
    return torch.eye(ROWS) + torch.eye(ROWS).roll(1, 0)


GRAPHS: dict[str, tuple[Callable[[Tensor, Any], Tensor], Callable[[], Any]]] = {
    "a matrix": (lambda x, matrix: matrix @ x, ring),
    "a sparse matrix": (lambda x, matrix: torch.sparse.mm(matrix, x), lambda: ring().to_sparse()),
    "indices": (by_edges, lambda: ring().nonzero().t()),
}

BATCHES: dict[str, tuple[Callable[[Tensor, Any], Tensor], Callable[[], Any]]] = {
    "nothing": (lambda x, _: x, lambda: None),
    "a mask": (lambda x, mask: x * mask, lambda: torch.ones(ROWS, 1)),
    "classes": (lambda x, kind: x + nn.functional.one_hot(kind, ROWS)[:, :3], lambda: torch.arange(ROWS)),
    "a matrix of features": (lambda x, matrix: x @ matrix, lambda: torch.eye(3)),
    "a table that is as long": (lambda x, table: x + table.sum(), lambda: torch.ones(ROWS)),
    "words that are more": (lambda x, words: x + words.float().mean(), lambda: torch.arange(4 * ROWS)),
}


@pytest.mark.parametrize("beside", GRAPHS)
def test_nodes_of_a_graph_are_cleaned_and_not_dropped(beside: str, guard: Guard) -> None:
    gather, make = GRAPHS[beside]
    first = guard(lambda: train(gather, make())).first
    assert first.cause == "nonfinite-input"
    assert (first.evidence["role"], first.evidence["samples"]) == ("input", [BAD])
    assert f"(row {BAD} of it)" in first.explanation
    assert [(fix.action, fix.verified) for fix in first.fixes] == [("fix-data", True)]


@pytest.mark.parametrize("beside", BATCHES)
def test_samples_of_a_batch_are_dropped(beside: str, guard: Guard) -> None:
    gather, make = BATCHES[beside]
    first = guard(lambda: train(gather, make())).first
    assert first.cause == "nonfinite-input"
    assert f"(sample {BAD} of the batch)" in first.explanation
    assert [(fix.action, fix.verified) for fix in first.fixes] == [("filter-sample", True), ("fix-data", True)]


def test_what_is_made_in_the_step_is_cut_as_well(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Bilinear(3, 3, 1)
        x = torch.randn(4, 3)
        x[2, 0] = float("nan")
        net(x, torch.randn(4, 3).tanh()).square().mean().backward()

    assert [fix.action for fix in guard(body).first.fixes] == ["filter-sample", "fix-data"]


def test_a_batch_of_which_one_is_left_says_nothing(guard: Guard) -> None:
    """A batch norm refuses a single sample."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        x = torch.tensor([[1.0, 2.0, float("nan")], [0.5, 1.0, 2.0]])
        net(x).square().sum().backward()

    first = guard(body).first
    assert [fix.action for fix in first.fixes] == ["filter-sample", "fix-data"]
