"""Tensors that have no strides: a graph's sparse adjacency matrix, the nested tensors of an encoder in evaluation."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]

ALONE = 2


def adjacency(layout: str) -> Tensor:
    """D^-1/2 A D^-1/2 of a ring with a node that has no neighbour: 0 * Inf."""
    edges = torch.zeros(6, 6)
    ring = torch.tensor([0, 1, 3, 4, 5])
    edges[ring, ring.roll(1)] = edges[ring.roll(1), ring] = 1.0
    degree = edges.sum(1).rsqrt()
    assert torch.isinf(degree[ALONE])
    normalised = degree[:, None] * edges * degree[None]
    return {"coo": normalised.to_sparse, "csr": normalised.to_sparse_csr, "dense": normalised.clone}[layout]()


class Graph(nn.Module):
    """A layer of a graph network, whose adjacency matrix is an attribute, a buffer, an argument or a variable around it."""

    def __init__(self, matrix: Tensor, comes_as: str) -> None:
        super().__init__()
        self.lift = nn.Linear(4, 3)
        if comes_as == "buffer":
            self.register_buffer("adjacency", matrix)
        else:
            self.adjacency = matrix if comes_as == "attribute" else None
        self.read = (lambda: matrix) if comes_as == "closure" else None

    def forward(self, x: Tensor, matrix: Tensor | None = None) -> Tensor:
        given = self.adjacency if self.adjacency is not None else matrix
        if self.read is not None:
            given = self.read()
        return torch.mm(given, self.lift(x))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("comes_as", ["attribute", "argument", "closure", "buffer"])
@pytest.mark.parametrize("layout", ["coo", "csr", "dense"])
def test_a_matrix_of_a_graph_is_named_and_its_repair_tried(guard: Guard, layout: str, comes_as: str) -> None:
    def body() -> None:
        torch.manual_seed(0)
        matrix = adjacency(layout)
        net = Graph(matrix, comes_as)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        given = (matrix,) if comes_as == "argument" else ()
        for _ in range(3):
            loss = net(torch.randn(6, 4), *given).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    incident = run.first
    cause, action = (
        ("nonfinite-input", "fix-data") if comes_as != "buffer" else ("nonfinite-parameter", "initialise-parameter")
    )
    assert (incident.cause, incident.step, incident.module) == (cause, 0, "")
    assert incident.evidence["name"] in ("matrix", "self.adjacency", "adjacency")
    cleaning = next(fix for fix in incident.fixes if fix.action == action)
    assert cleaning.verified, cleaning.outcome


def test_an_encoder_that_computes_on_nested_tensors_in_evaluation(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        net = nn.TransformerEncoder(layer, 1)
        tokens = torch.randn(3, 5, 8)
        pad = torch.zeros(3, 5, dtype=torch.bool)
        pad[1] = True
        pad[2, 3:] = True
        net.eval()
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hidden = net(tokens, src_key_padding_mask=pad)
            assert not hidden[1].any(), "it did not take the way of nested tensors"
            mean = hidden.sum(1) / (~pad).sum(1, keepdim=True)
            float(mean.sum())

    run = guard(body)
    assert run.faults == 0, run.stderr
    incident = run.first
    assert (incident.cause, incident.mode) == ("division-by-zero", "eval")
    assert incident.location.code == "mean = hidden.sum(1) / (~pad).sum(1, keepdim=True)"
    assert any(fix.verified for fix in incident.fixes)


def test_bad_values_that_come_out_of_a_nested_tensor_are_followed_into_it(guard: Guard) -> None:
    class Ragged(nn.Module):
        def forward(self, *rows: Tensor) -> Tensor:
            nested = torch.nested.as_nested_tensor([row.log() for row in rows])
            return torch.nested.to_padded_tensor(nested * 2.0, 0.0)

    def body() -> None:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            padded = Ragged().eval()(torch.ones(2, 3), torch.tensor([[1.0, 0.0, 2.0]]))
            float(padded.sum())

    run = guard(body)
    assert run.faults == 0, run.stderr
    incident = run.first
    assert (incident.cause, incident.op) == ("domain-error", "aten.log.default")
    assert "row.log()" in incident.location.code


def test_weights_that_are_kept_in_float8(guard: Guard) -> None:
    """PyTorch computes nothing with them; a layer of zeros had a scale of 0."""

    class Quantised(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            scale = weight.abs().amax() / 448.0
            self.register_buffer("scale", scale)
            self.register_buffer("weight", (weight / scale).to(torch.float8_e4m3fn))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.weight.to(x.dtype) * self.scale).t()  # type: ignore[operator]

    def body() -> None:
        net = nn.Sequential(Quantised(torch.randn(4, 4)), Quantised(torch.zeros(4, 4))).eval()
        with torch.inference_mode():
            net(torch.randn(2, 4))

    run = guard(body)
    assert run.faults == 0, run.stderr
    incident = run.first
    assert (incident.cause, incident.evidence["name"]) == ("nonfinite-parameter", "1.weight")
    assert any(fix.action == "initialise-parameter" and fix.verified for fix in incident.fixes)


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("rate", [0.05, 60.0])
def test_a_loop_whose_batches_are_sparse_and_nested(guard: Guard, rate: float) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Parameter(torch.randn(20, 4) * 0.1)
            self.lift = nn.Linear(4, 4)
            self.out = nn.Linear(4, 3)

        def forward(self, bag: Tensor, rows: Tensor) -> Tensor:
            padded = torch.nested.to_padded_tensor(torch.relu(self.lift(rows)), 0.0)
            return self.out(torch.tanh(torch.sparse.mm(bag, self.words)) + padded.sum(1))

    def body() -> list[Any]:
        torch.manual_seed(0)
        net = Words()
        optimizer = torch.optim.SGD(net.parameters(), rate, momentum=0.9)
        for step in range(20):
            bag = (torch.rand(6, 20) < 0.2).float()
            rows = torch.nested.nested_tensor([torch.randn(int(n), 4) for n in torch.randint(1, 4, (6,))])
            given = bag.to_sparse_csr() if step % 2 else bag.to_sparse()
            loss = nn.functional.cross_entropy(net(given, rows), bag.sum(1).long() % 3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [p.tolist() for p in net.parameters()]

    run = guard(body)
    assert run.faults == 0, run.stderr
    if rate < 1:
        assert not run.report.incidents
        assert run.result == body()
    else:
        assert run.first.cause == "divergence"
        assert any(fix.verified for fix in run.first.fixes)
