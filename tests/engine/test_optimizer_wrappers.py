"""Wrappers around optimizers (Lookahead, as it is mostly written): their own format of a state, or none; no step hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_loops import Net, batch
from torch import nn

import ampguard
from ampguard.errors import CheckpointError, SetupError


class Wrapper(torch.optim.Optimizer):
    """Takes what its optimizer holds, and calls no constructor of PyTorch's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = {}
        self.calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class WithState(Wrapper):
    def state_dict(self) -> dict[str, Any]:
        inner = self.optimizer.state_dict()
        return {"fast_state": inner["state"], "calls": self.calls, "param_groups": inner["param_groups"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["calls"] == 3:
            raise ValueError("three calls")
        self.calls = state["calls"]
        self.optimizer.load_state_dict({"state": state["fast_state"], "param_groups": state["param_groups"]})


def made(kind: type[Wrapper], seed: int = 0) -> tuple[Net, Wrapper, ampguard.Amp]:
    torch.manual_seed(seed)
    model = Net(dropout=0.0)
    optimizer = kind(torch.optim.AdamW(model.parameters(), 1e-2))
    return model, optimizer, ampguard.Amp(model, optimizer, init_scale=1024.0)


def train(model: Net, amp: ampguard.Amp, first: int, last: int) -> None:
    for number in range(first, last):
        x, y = batch(number)
        with amp.autocast():
            loss = nn.functional.mse_loss(model(x), y)
        amp.backward(loss)
        amp.step()


def test_a_state_in_its_own_format_resumes_bit_for_bit(tmp_path: Path) -> None:
    model, _, amp = made(WithState)
    train(model, amp, 0, 5)
    amp.save(tmp_path / "state.pt")
    train(model, amp, 5, 9)
    other, wrapper, resumed = made(WithState, seed=1)
    resumed.load(tmp_path / "state.pt")
    train(other, resumed, 5, 9)
    assert wrapper.calls == 9
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


def test_where_it_refuses_its_state_nothing_has_changed() -> None:
    model, _, amp = made(WithState)
    train(model, amp, 0, 3)
    other, _, resumed = made(WithState, seed=1)
    before = [t.clone() for t in other.state_dict().values()]
    with pytest.raises(ValueError, match="three calls"):
        resumed.load_state_dict(amp.state_dict())
    assert all(map(torch.equal, before, other.state_dict().values()))


def test_another_format_is_refused() -> None:
    _, _, amp = made(WithState)
    state = amp.state_dict()
    del state["optimizers"]["WithState"]["fast_state"]
    with pytest.raises(CheckpointError, match="the state of `WithState` holds"):
        amp.load_state_dict(state)


def test_one_without_a_state_trains_and_is_not_saved(tmp_path: Path) -> None:
    model, _, amp = made(Wrapper)
    train(model, amp, 0, 3)
    assert amp.steps == 3
    with pytest.raises(CheckpointError, match=r"Wrapper\.state_dict\(\) raised AttributeError"):
        amp.save(tmp_path / "state.pt")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_without_step_hooks_it_is_refused_before_the_model_is_cast(level: str) -> None:
    model = Net()
    optimizer = Wrapper(torch.optim.AdamW(model.parameters(), 1e-2))
    with pytest.raises(SetupError, match="no step hooks"):
        ampguard.precision(level, "cpu").prepare(model, optimizer)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    ampguard.precision("O1", "cpu").prepare(model, optimizer)
