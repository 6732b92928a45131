"""A checkpoint needs the scaler that scales its own model's losses, not one of another stage or model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ampguard


def train(model: nn.Module, scaler: torch.amp.GradScaler | None, save: Callable[[torch.optim.Optimizer], None]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for step in range(8):
        with torch.autocast("cpu", torch.float16, enabled=scaler is not None):
            loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        if step % 3 == 0:
            save(optimizer)


@pytest.mark.parametrize("saved_stage", ["first", "second"])
def test_a_stage_in_float32_behind_one_with_a_scaler(
    guard: Callable[..., Any], tmp_path: Path, saved_stage: str
) -> None:
    def loop() -> None:
        torch.manual_seed(0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for stage, used in (("first", scaler), ("second", None)):
            model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))

            def save(optimizer: torch.optim.Optimizer, stage: str = stage, model: nn.Module = model) -> None:
                if stage == saved_stage:
                    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt")

            train(model, used, save)

    found = [i.cause for i in guard(loop).report.incidents if i.severity != "info"]
    assert found == (["scaler-not-saved"] if saved_stage == "first" else [])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "O2"])
def test_an_engine_behind_another_one(guard: Callable[..., Any], tmp_path: Path, precision: str) -> None:
    def loop() -> None:
        torch.manual_seed(0)
        kept = []
        for name in ("fp16", precision):
            model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
            amp = ampguard.Amp(model, torch.optim.SGD(model.parameters(), 1e-2), name, init_scale=1024.0)
            kept.append(amp)
            for step in range(8):
                with amp.autocast():
                    loss = model(torch.randn(8, 4)).square().mean()
                amp.backward(loss)
                amp.step()
                if step % 3 == 0 and len(kept) == 2:
                    amp.save(tmp_path / "last.pt")

    assert [i.cause for i in guard(loop).report.incidents if i.severity != "info"] == []


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("saved_stage", ["first", "second"])
def test_an_optimizers_state_in_a_file_of_its_own(
    guard: Callable[..., Any], tmp_path: Path, saved_stage: str, momentum: float
) -> None:
    """As Transformers' Trainer writes it: no weights tell whose it is."""

    def loop() -> None:
        torch.manual_seed(0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for stage in ("first", "second"):
            model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
            optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=momentum)
            for step in range(8):
                with torch.autocast("cpu", torch.float16, enabled=stage == "first"):
                    loss = model(torch.randn(8, 4)).square().mean()
                optimizer.zero_grad()
                if stage == "first":
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    loss.backward()
                    optimizer.step()
                if step % 3 == 0 and stage == saved_stage:
                    torch.save(model.state_dict(), tmp_path / "model.pt")
                    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")

    found = [i.cause for i in guard(loop).report.incidents if i.severity != "info"]
    assert found == (["scaler-not-saved"] if saved_stage == "first" else [])
