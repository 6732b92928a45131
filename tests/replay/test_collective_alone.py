"""A module that talks to the other ranks in its forward pass, trained on one: there is nobody to wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

Guard = Callable[..., Any]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group with one member, as scripts begin that are written for many."""
    if not dist.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'ranks'}", world_size=1, rank=0)
    yield
    dist.destroy_process_group()


class Distillation(nn.Module):
    """A teacher's output, centred by the mean over all ranks and sharpened by a temperature that follows a schedule."""

    def __init__(self, temperatures: list[float]) -> None:
        super().__init__()
        self.temperatures = temperatures
        self.register_buffer("center", torch.zeros(1, 8))

    def forward(self, student: Tensor, teacher: Tensor, epoch: int) -> Tensor:
        sharpened = ((teacher - self.center) / self.temperatures[epoch]).softmax(-1)
        loss = -(sharpened.detach() * student.log_softmax(-1)).sum(-1).mean()
        self.follow(teacher)
        return loss

    @torch.no_grad()
    def follow(self, teacher: Tensor) -> None:
        mean = teacher.sum(0, keepdim=True)
        dist.all_reduce(mean)
        self.center = self.center * 0.9 + mean / (len(teacher) * dist.get_world_size()) * 0.1


def train(temperatures: list[float]) -> None:
    torch.manual_seed(0)
    student, teacher = nn.Linear(6, 8), nn.Linear(6, 8).requires_grad_(False)
    criterion = Distillation(temperatures)
    optimizer = torch.optim.SGD(student.parameters(), lr=1e-2)
    for epoch in range(len(temperatures)):
        for _ in range(3):
            x = torch.randn(5, 6)
            loss = criterion(student(x), teacher(x), epoch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()


@pytest.mark.usefixtures("alone")
def test_the_step_is_replayed_with_its_collective(guard: Guard) -> None:
    run = guard(lambda: train([0.04, 0.0]))
    assert (run.first.cause, run.first.step, run.first.op) == ("division-by-zero", 3, "aten.div.Tensor")
    assert "self.temperatures[epoch]" in run.first.location.code
    assert run.first.evidence["rung"] == "replay"


@pytest.mark.usefixtures("alone")
def test_a_schedule_above_zero_is_silent(guard: Guard) -> None:
    assert guard(lambda: train([0.04, 0.02])).causes == []
