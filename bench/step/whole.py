"""A whole training step of the workloads of bench/overhead, with GradScaler and with our step, clipping in both."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from ampguard.engine.step import LossScale, apply_update, check_gradients

sys.path.append(str(Path(__file__).parent.parent / "overhead"))


def loop(workload: str, is_ours: bool, device: str, fused: bool | None) -> Callable[[], Tensor]:
    """A function that trains a workload's model by one step."""
    model, _ = importlib.import_module(workload).make(device)
    torch.manual_seed(0)
    inputs, labels = batch(workload, device)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=None if is_ours else fused)
    end = ours if is_ours else theirs
    return end(model, optimizer, parameters, inputs, labels, device)


def batch(workload: str, device: str) -> tuple[Tensor, Tensor]:
    if workload == "tiny":
        return torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device)
    return torch.randn(2, 3, 24, 24, device=device), torch.randint(10, (2,), device=device)


def theirs(
    model: nn.Module, optimizer: torch.optim.Optimizer, parameters: list[Tensor], x: Tensor, y: Tensor, device: str
) -> Callable[[], Tensor]:
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def ours(
    model: nn.Module, optimizer: torch.optim.Optimizer, parameters: list[Tensor], x: Tensor, y: Tensor, device: str
) -> Callable[[], Tensor]:
    loss_scale = LossScale(device, init_scale=1024.0)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            loss = functional.cross_entropy(model(x), y)
        loss_scale.scale(loss).backward()
        check = check_gradients(parameters, loss_scale.value)
        apply_update(optimizer, check, 1.0)
        loss_scale.update([check.found_inf])
        return loss.detach()

    return step
