"""A derivative inside a TorchScript graph, which autograd knows as one node: which operator's it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


class Angular(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, 0.0], [0.6, 0.8], [-0.6, 0.8]]))

    def forward(self, x: Tensor) -> Tensor:
        cosine = x @ self.weight.t()
        angle = torch.acos(cosine)
        return torch.cos(angle + 0.1) * 4.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.head = torch.jit.script(Angular())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


def test_the_operator_of_a_graph_is_named(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = Net()
        with torch.no_grad():
            net.inner.weight.copy_(torch.eye(2))
            net.inner.bias.zero_()
        optimizer = torch.optim.SGD(net.parameters(), 1e-6)
        for step in range(6):  # TorchScript differentiates by itself from the third call on
            x = torch.tensor([[0.5, 0.2], [0.1, -0.3]])
            if step == 5:
                with torch.no_grad():
                    net.inner.weight.copy_(torch.eye(2))
                    net.inner.bias.zero_()
                    net.head.weight.copy_(torch.tensor([[1.0, 0.0], [0.6, 0.8], [-0.6, 0.8]]))
                x[1] = torch.tensor([1.0, 0.0])
            loss = net(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert math.isfinite(loss.item())

    first = guard(body).first
    assert (first.cause, first.step, first.module) == ("singular-gradient", 5, "head")
    assert "the derivative of acos at 1 in head is" in first.explanation
    assert [(fix.action, fix.verified) for fix in first.fixes] == [("clamp", None)]
    assert "the operand of acos" in first.fixes[0].how


@pytest.mark.parametrize("calls", [1, 2])
def test_before_it_is_optimised_the_graph_has_nodes_of_its_own(calls: int, guard: Guard) -> None:
    def body() -> None:
        head = torch.jit.script(Angular())
        for call in range(calls):
            x = torch.tensor([[1.0 if call == calls - 1 else 0.5, 0.0]])
            head(x).square().mean().backward()
            head.zero_grad()

    assert "the derivative of acos at 1" in guard(body).first.explanation
