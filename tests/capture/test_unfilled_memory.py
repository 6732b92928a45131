"""Memory that was asked for and not filled yet holds anything: it is no result."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from watching import seed_everything

import ampguard


@pytest.fixture
def _memory_of_nan() -> Iterator[None]:
    """New memory holds NaN, as it may."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def training(raises_at: int) -> None:
    seed_everything()
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        out = model(torch.randn(4, 3))
        received = torch.empty_like(out)
        if step == raises_at:
            assert received.isnan().all()
            raise TimeoutError("the neighbour does not answer")
        received.copy_(out.detach())
        optimizer.zero_grad()
        (out - 0.5 * received).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("raises_at", [0, 3])
@pytest.mark.usefixtures("_memory_of_nan")
def test_an_error_while_a_buffer_waits_to_be_filled(raises_at: int, tmp_path: Path) -> None:
    with pytest.raises(TimeoutError), ampguard.watch(out=tmp_path / "run") as session:
        training(raises_at)
    assert session.report is not None
    assert not session.report.incidents
