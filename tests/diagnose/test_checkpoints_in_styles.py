"""Checkpoints without the scaler in other styles than a dictionary that `torch.save` is given by position."""

from __future__ import annotations

import dataclasses
import gzip
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]
Save = Callable[[dict[str, Any], Path], None]


@dataclasses.dataclass
class Snapshot:
    model: dict[str, Any]
    optimizer: dict[str, Any]
    scaler: dict[str, Any] | None = None


def pickled(state: dict[str, Any], path: Path) -> None:
    with gzip.open(path, "wb") as file:
        pickle.dump(state, file)


def saved_by_name(state: dict[str, Any], path: Path) -> None:
    torch.save(obj=state, f=path)


def saved_as_object(state: dict[str, Any], path: Path) -> None:
    torch.save(Snapshot(**state), path)


def training(save: Save, path: Path, with_scaler: bool) -> Callable[[], None]:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        opt = torch.optim.Adam(model.parameters())
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=256.0)
        for step in range(8):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(torch.randn(8, 4))
            scaler.scale(out.float().square().mean()).backward()
            scaler.step(opt)
            scaler.update()
            if step == 3:
                state = {"model": model.state_dict(), "optimizer": opt.state_dict()}
                save({**state, "scaler": scaler.state_dict()} if with_scaler else state, path / "last.ckpt")

    return body


@pytest.mark.parametrize("save", [pickled, saved_by_name, saved_as_object])
@pytest.mark.parametrize("with_scaler", [False, True])
def test_a_checkpoint_without_the_scaler(save: Save, with_scaler: bool, guard: Guard, tmp_path: Path) -> None:
    run = guard(training(save, tmp_path, with_scaler))

    assert run.faults == 0, run.stderr
    found = [(i.cause, i.step, i.location.function) for i in run.report.incidents if i.location is not None]
    assert found == ([] if with_scaler else [("scaler-not-saved", 3, save.__name__)])
    assert (tmp_path / "last.ckpt").exists()
