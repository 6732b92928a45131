"""A model that a framework has wrapped: the line of an operator in PyTorch's own modules is the script's call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ampguard
from ampguard.report.store import read_report

Prepared = tuple[Callable[..., Any], torch.optim.Optimizer, Callable[[torch.Tensor], None]]


@pytest.fixture(autouse=True)
def _accelerate_begins_anew() -> Iterator[None]:
    state = pytest.importorskip("accelerate.state")
    state.AcceleratorState._reset_state(True)
    yield
    state.AcceleratorState._reset_state(True)


def by_accelerate(net: nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model, optimizer = accelerator.prepare(net, optimizer)
    return model, optimizer, accelerator.backward


def by_fabric(net: nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
    lightning = pytest.importorskip("lightning.fabric")
    fabric = lightning.Fabric(accelerator="cpu", precision="bf16-mixed")
    model, optimizer = fabric.setup(net, optimizer)
    return model, optimizer, fabric.backward


@pytest.mark.parametrize("prepared", [by_accelerate, by_fabric])
def test_line_is_the_scripts_call(prepared: Callable[..., Prepared], tmp_path: Path) -> None:
    with ampguard.watch(out=tmp_path):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
        model, optimizer, backward = prepared(net, torch.optim.SGD(net.parameters(), 0.01))
        for step in range(3):
            x = torch.randn(6, 4)
            if step == 2:
                x[3, 1] = float("inf")
            optimizer.zero_grad()
            loss = model(x).square().mean()  # the call
            backward(loss)
            optimizer.step()

    first = read_report(tmp_path / "report.json").incidents[0]
    assert (first.cause, first.step) == ("nonfinite-input", 2)
    assert first.module in ("0", ""), "Fabric casts the batch itself"
    assert first.location is not None
    assert first.location.file.endswith("test_wrapped_models.py")
    assert first.location.code == "loss = model(x).square().mean()  # the call"
