"""A whole training step of the workloads of bench/overhead: a plain torch.amp loop, and the same loop with `Amp`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import ampguard

sys.path.append(str(Path(__file__).parent.parent / "overhead"))
SCALE = 1024.0


def loop(workload: str, is_ours: bool, device: str, fused: bool | None, max_norm: float | None) -> Callable[[], Tensor]:
    """A function that trains a workload's model by one step; both loops are given the same optimizer."""
    model, _ = importlib.import_module(workload).make(device)
    torch.manual_seed(0)
    inputs, labels = batch(workload, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    return (ours if is_ours else theirs)(model, optimizer, max_norm, inputs, labels, device)


def batch(workload: str, device: str) -> tuple[Tensor, Tensor]:
    if workload == "tiny":
        return torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device)
    return torch.randn(2, 3, 24, 24, device=device), torch.randint(10, (2,), device=device)


def theirs(
    model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | None, x: Tensor, y: Tensor, device: str
) -> Callable[[], Tensor]:
    scaler = torch.amp.GradScaler(device, init_scale=SCALE)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def ours(
    model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | None, x: Tensor, y: Tensor, device: str
) -> Callable[[], Tensor]:
    amp = ampguard.Amp(model, optimizer, "fp16", max_grad_norm=max_norm, init_scale=SCALE)

    def step() -> Tensor:
        with amp.autocast():
            loss = functional.cross_entropy(model(x), y)
        amp.backward(loss)
        amp.step()
        return loss.detach()

    return step
