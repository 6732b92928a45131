"""Checkpoints through torch.distributed.checkpoint that cannot be read or written: our error, and nothing half-loaded."""

from __future__ import annotations

import copy
import logging
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_loops import made, model_of, train

import ampguard
from ampguard.errors import CheckpointError


@pytest.fixture(autouse=True)
def without_ranks(caplog: pytest.LogCaptureFixture) -> None:
    """PyTorch says that it assumes a single process, and what it could not read."""
    warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
    caplog.set_level(logging.CRITICAL, logger="torch.distributed.checkpoint")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    amp = made("fp16")
    train(amp, range(2))
    amp.save_sharded(tmp_path / "whole")
    return tmp_path / "whole"


def lose_metadata(folder: Path) -> None:
    (folder / ".metadata").unlink()


def lose_tensors(folder: Path) -> None:
    next(folder.glob("*.distcp")).unlink()


def truncate(folder: Path) -> None:
    """The tensors in front can still be read."""
    file = next(folder.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 6 // 10])


def lose_all(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize("spoil", [lose_metadata, lose_tensors, truncate, lose_all])
def test_a_spoilt_checkpoint_changes_nothing(saved: Path, spoil: Callable[[Path], None]) -> None:
    spoil(saved)
    amp = made("fp16", seed=1)
    train(amp, range(3))
    before = copy.deepcopy(model_of(amp).state_dict())
    with pytest.raises(CheckpointError, match=r"the checkpoint '.*whole' was not loaded"):
        amp.load_sharded(saved)
    for name, value in model_of(amp).state_dict().items():
        assert torch.equal(value, before[name]), name
    train(amp, range(3, 4))
    assert amp.steps == 4


def test_one_that_holds_nan_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    amp = made("fp16")
    train(amp, range(2))
    with torch.no_grad():
        model_of(amp).head.weight[0, 0] = torch.nan
    with monkeypatch.context() as patch:
        patch.setattr("ampguard.engine.checkpoint.sharded.nonfinite_leaves", lambda parts: [])
        amp.save_sharded(tmp_path / "nan")
    again = made("fp16", seed=1)
    before = model_of(again).head.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"head\.weight` holds NaN or Inf"):
        again.load_sharded(tmp_path / "nan")
    assert torch.equal(model_of(again).head.weight, before)


def test_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    amp: ampguard.Amp = made("fp16")
    train(amp, range(1))
    with pytest.raises(CheckpointError, match=r"the checkpoint '.*file' was not written"):
        amp.save_sharded(tmp_path / "file")


def test_a_mask_that_is_infinite_from_the_start_is_saved(saved: Path) -> None:
    again = made("fp16", seed=1)
    again.load_sharded(saved)
    assert torch.equal(model_of(again).mask, torch.tensor([0.0, -torch.inf]))
    assert again.steps == 2
