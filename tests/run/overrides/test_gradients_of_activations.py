"""Gradients of activations that a script looks at, or changes: it sees them without the gained loss scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Keeps the gradient of its hidden layer, logs it, and halves it."""

    def __init__(self, seen: list[float], halves: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 24), nn.Linear(24, 3)
        self.seen, self.halves = seen, halves

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = torch.relu(self.first(x))
        self.hidden.retain_grad()
        self.hidden.register_hook(lambda gradient: self.seen.append(float(gradient.norm())))
        if self.halves:
            self.hidden.register_hook(lambda gradient: gradient * 0.5)
        return self.second(self.hidden)


def train(halves: bool = False, steps: int = 6) -> dict[str, Any]:
    torch.manual_seed(0)
    hooks: list[float] = []
    modules: list[float] = []
    net = Net(hooks, halves)
    net.second.register_full_backward_hook(lambda module, into, out: modules.append(float(out[0].norm())))
    if halves:
        net.second.register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(steps):
        x = torch.randn(16, 6)
        out = net(x)
        out.retain_grad()
        loss = nn.functional.cross_entropy(out, (x[:, 0] > 0).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert net.hidden.grad is not None
    assert out.grad is not None
    return {
        "hooks": hooks,
        "modules": modules,
        "kept": [float(net.hidden.grad.norm()), float(out.grad.norm())],
        "weights": [float(p.detach().norm()) for p in net.parameters()],
    }


@pytest.mark.parametrize("precision", ["fp16", "O2"])
@pytest.mark.parametrize("halves", [False, True])
def test_they_are_seen_without_the_scale(overridden: Callable[..., Any], precision: str, halves: bool) -> None:
    expected = train(halves)
    registered = nn.Module.register_full_backward_hook, Tensor.register_hook, Tensor.retain_grad
    with overridden(precision) as session:
        seen = train(halves)
    assert "gained a dynamic loss scale" in session.report.run["did"]
    for what, numbers in expected.items():
        assert seen[what] == pytest.approx(numbers, rel=0.02), what
    assert [i.cause for i in session.report.incidents if i.severity != "info"] == []
    assert registered == (nn.Module.register_full_backward_hook, Tensor.register_hook, Tensor.retain_grad)
