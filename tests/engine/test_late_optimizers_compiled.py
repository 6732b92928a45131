"""The look at optimizers as they step is nothing for the compiler to trace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampguard.engine.precision import late_optimizers


def test_a_compiled_step_does_not_trace_it(monkeypatch: pytest.MonkeyPatch) -> None:
    late_optimizers.note_cast([nn.Parameter(torch.zeros(2))])
    looked: list[bool] = []
    monkeypatch.setattr(late_optimizers, "refuse_late", lambda optimizer: looked.append(torch.compiler.is_compiling()))
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    before = model.weight.detach().clone()
    torch.compile(step, backend="eager")(torch.randn(3, 4))
    assert not torch.equal(before, model.weight)
    assert True not in looked
