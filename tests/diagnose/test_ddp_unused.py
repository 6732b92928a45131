"""DistributedDataParallel refuses a forward pass because parameters had no gradient: the card says which, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Guard = Callable[..., Any]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.often, self.rarely = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor, rare: bool) -> Tensor:
        return (self.rarely if rare else self.often)(self.trunk(x).tanh())


def training(clears_first: bool, **options: Any) -> Callable[[], None]:
    def body() -> None:
        torch.manual_seed(0)
        model = DistributedDataParallel(TwoHeads(), **options)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            if clears_first:
                opt.zero_grad()
            loss = model(torch.randn(3, 4), step == 3).square().mean()  # call
            opt.zero_grad()
            loss.backward()
            opt.step()

    return body


@pytest.mark.parametrize("clears_first", [True, False])
def test_the_parameters_are_named(clears_first: bool, guard: Guard) -> None:
    def body() -> None:
        with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
            training(clears_first)()

    run = guard(body)
    assert (run.faults, run.causes) == (0, ["unused-parameters"])
    incident = run.first
    assert (incident.step, incident.severity, incident.module) == (1, "error", "rarely")
    assert incident.evidence["parameters"] == ["rarely.weight", "rarely.bias"]
    assert incident.location is not None
    assert incident.location.code.endswith("# call")
    assert any("find_unused_parameters" in fix.how for fix in incident.fixes)


def test_where_ddp_looks_for_them_nothing_is_told(guard: Guard) -> None:
    run = guard(training(True, find_unused_parameters=True))
    assert (run.faults, run.causes) == (0, [])
