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


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_step_that_was_compiled_before_the_guard_runs_on(backend: str, tmp_path: Path) -> None:
    """Dynamo puts back the dispatch keys with which a call began: it must not begin under our tape."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    @torch.compile(backend=backend)
    def step(x: Tensor) -> None:
        model(x).square().mean().backward()

    with ampguard.watch(out=tmp_path / "run") as watched:
        for _ in range(6):
            optimizer.zero_grad()
            x = torch.rand(8, 4)
            step(x - x.mean())
            optimizer.step()
    assert watched.report is not None
    assert (watched.report.steps, watched.report.incidents) == (6, ())
