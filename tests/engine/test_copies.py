"""`copy.deepcopy` and pickle of an `Amp`, and of what holds one."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from engine_loops import batch
from torch import nn

import ampguard
from ampguard.errors import ProtocolError, SetupError


class Trainer(nn.Module):
    """A model that keeps its engine, as research code does."""

    def __init__(self, precision: str = "fp16", accumulate: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.amp = ampguard.Amp(
            self.net,
            self.optimizer,
            precision,
            schedulers=self.scheduler,
            accumulate=accumulate,
            init_scale=256.0,
            max_grad_norm=1.0,
        )

    def train_on(self, numbers: range) -> None:
        for number in numbers:
            x, y = batch(number)
            with self.amp.autocast():
                loss = nn.functional.mse_loss(self.net(x).float(), y)
            self.amp.backward(loss)
            self.amp.step()

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.net.parameters()])


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_a_copy_goes_on_as_the_original_would(precision: str, caplog: pytest.LogCaptureFixture) -> None:
    """In the middle of an accumulation window; neither knows of the other."""
    original = Trainer(precision, accumulate=2)
    original.train_on(range(5))
    caplog.clear()
    twin = copy.deepcopy(original)
    at_the_copy = original.weights()
    twin.train_on(range(5, 12))
    assert torch.equal(original.weights(), at_the_copy)
    assert (original.amp.steps, twin.amp.steps) == (2, 6)
    original.train_on(range(5, 12))
    assert torch.equal(original.weights(), twin.weights())
    assert original.optimizer.param_groups[0]["lr"] == twin.optimizer.param_groups[0]["lr"]
    assert twin.amp.name_of(twin.net[2].weight) == "2.weight"
    assert not caplog.text


def test_a_copy_refuses_what_the_original_does() -> None:
    original = Trainer()
    original.train_on(range(2))
    twin = copy.deepcopy(original)
    x, y = batch(2)
    twin.amp.backward(nn.functional.mse_loss(twin.net(x), y))
    with pytest.raises(ProtocolError, match="times too large"):
        twin.optimizer.step()


@pytest.mark.parametrize("precision", ["O2", "O3", "bf16-true"])
def test_where_the_model_was_cast_a_copy_is_refused(precision: str) -> None:
    trainer = Trainer(precision)
    trainer.train_on(range(2))
    with pytest.raises(SetupError, match=r"(?s)cannot be copied.*amp\.load_state_dict\(state\)"):
        copy.deepcopy(trainer)
    trainer.train_on(range(2, 4))


def test_it_cannot_be_pickled() -> None:
    with pytest.raises(SetupError, match=r"(?s)cannot be pickled.*amp\.save\(path\)"):
        pickle.dumps(Trainer().amp)
