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
from engine_loops import batch, made, model_of, same, train
from torch import nn

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


def alter(folder: Path, tensor: torch.Tensor) -> None:
    """Another last bit of one element: still a finite number."""
    part = tensor.detach().numpy().tobytes()
    for file in folder.glob("*.distcp"):
        content = file.read_bytes()
        if part in content:
            file.write_bytes(content.replace(part, bytes([part[0] ^ 1]) + part[1:]))
            return
    raise AssertionError("the tensor is in no file")


@pytest.mark.parametrize("which", ["weight", "moment"])
def test_altered_bytes_are_named(tmp_path: Path, which: str) -> None:
    amp = made("fp16")
    train(amp, range(2))
    amp.save_sharded(tmp_path / "ck")
    weight = model_of(amp).inner.weight
    alter(tmp_path / "ck", weight if which == "weight" else amp.optimizers["AdamW"].state[weight]["exp_avg"])
    again = made("fp16", seed=1)
    before = copy.deepcopy(again.state_dict())
    with pytest.raises(CheckpointError, match=r"inner\.weight[a-z_.]*` is not what was saved: it was altered"):
        again.load_sharded(tmp_path / "ck")
    assert not again.optimizers["AdamW"].state
    again.load_state_dict(before)  # nothing has changed: its seal would not hold


def test_altered_progress_is_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = torch.load

    def other(*args: object, **options: object) -> object:
        loaded = read(*args, **options)
        if isinstance(loaded, dict) and "progress" in loaded:
            loaded["progress"]["steps"] += 1
        return loaded

    monkeypatch.setattr(torch, "load", other)
    with pytest.raises(CheckpointError, match="what it says of itself does not match its seal"):
        made("fp16", seed=1).load_sharded(saved)


class Heads(nn.Module):
    """Of two heads only the first is trained at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 1), nn.Linear(8, 1)


def with_heads() -> tuple[Heads, ampguard.Amp, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    heads = Heads()
    optimizer = torch.optim.AdamW(heads.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    return heads, ampguard.Amp(heads, optimizer, schedulers=scheduler), scheduler


def steps_of(heads: Heads, amp: ampguard.Amp, steps: range) -> list[torch.Tensor]:
    for step in steps:
        x, y = batch(step)
        with amp.autocast():
            loss = nn.functional.mse_loss((heads.first if step < 4 else heads.second)(x), y)
        amp.backward(loss)
        amp.step()
    return [p.detach().clone() for p in heads.parameters()]


@pytest.mark.parametrize("saved_at", [0, 2, 5])
def test_resumed_bit_for_bit_where_parameters_have_no_state_yet(tmp_path: Path, saved_at: int) -> None:
    heads, amp, scheduler = with_heads()
    steps_of(heads, amp, range(saved_at))
    amp.save_sharded(tmp_path / "ck")
    expected = steps_of(heads, amp, range(saved_at, 7))
    untouched, plain, _ = with_heads()
    assert same(steps_of(untouched, plain, range(7)), expected)  # saving has changed nothing
    for trained_before in (0, 1):
        again, resumed, its = with_heads()
        steps_of(again, resumed, range(trained_before))
        resumed.load_sharded(tmp_path / "ck")
        assert same(steps_of(again, resumed, range(saved_at, 7)), expected)
        assert its.get_last_lr() == scheduler.get_last_lr()


def test_another_optimizer_or_model_is_refused(saved: Path) -> None:
    model = model_of(made("fp16"))
    with pytest.raises(CheckpointError, match=r"kinds=\['AdamW'\], here it is \['SGD'\]"):
        ampguard.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)).load_sharded(saved)
    small = nn.Sequential()
    small.add_module("inner", nn.Linear(8, 32))
    with pytest.raises(
        CheckpointError, match=r"its models are others: \d+ of its tensors are not in them \(`model_0\."
    ):
        ampguard.Amp(small, torch.optim.AdamW(small.parameters())).load_sharded(saved)
