"""A compiled training step: the guard neither breaks it nor tells of its failure twice, and names no generated code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ampguard


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_step_that_fails(backend: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ampguard.watch(out=tmp_path / "run") as watched:

        @torch.compile(backend=backend)
        def step(x: Tensor) -> None:
            loss = model(x).square().mean() + x.sum(1).log().mean()
            loss.backward()

        for i in range(5):
            step(torch.full((8, 4), -1.0) if i == 3 else torch.rand(8, 4) + 0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert watched.report is not None
    (incident,) = watched.report.incidents
    assert (incident.step, incident.mode) == (3, "train")
    assert incident.cause == ("domain-error" if backend == "aot_eager" else "unexplained")
    assert incident.location is None or incident.location.file == __file__
