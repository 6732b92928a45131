"""In-place operators on a part of a tensor: the chain of bad values goes on behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Guard = Callable[..., Any]


class Cell(nn.Module):
    """A recurrent cell: PyTorch's own writes its gates in place, each in a quarter of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.prenet = nn.Linear(8, 16, bias=False)
        self.rnn = nn.LSTMCell(16, 12)
        self.out = nn.Linear(12, 8)

    def forward(self, frames: Tensor) -> Tensor:
        frames = torch.relu(self.prenet(frames.transpose(0, 1)))
        state = (frames.new_zeros(frames.shape[1], 12), frames.new_zeros(frames.shape[1], 12))
        outputs = []
        for frame in frames:
            state = self.rnn(frame, state)
            outputs.append(self.out(state[0]))
        return torch.stack(outputs, 1)


class Gates(nn.Module):
    """The same by hand: slices of one tensor are written to."""

    def __init__(self) -> None:
        super().__init__()
        self.prenet = nn.Linear(8, 12, bias=False)
        self.out = nn.Linear(4, 8)

    def forward(self, frames: Tensor) -> Tensor:
        gates = self.prenet(frames) * 1.0
        gates[..., :4].mul_(2.0)
        gates[..., 4:8].mul_(0.5)
        first, second, third = gates.split(4, -1)
        return self.out(first + second + third)


def train(net: nn.Module, bad_sample: int | None) -> None:
    torch.manual_seed(0)
    frames = torch.randn(16, 6, 8)
    if bad_sample is not None:
        frames[bad_sample, 3] = float("-inf")
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for x, y in DataLoader(TensorDataset(frames, torch.randn(16, 6, 8)), batch_size=4):
        loss = nn.functional.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()


def test_gates_written_in_place_do_not_end_the_chain(guard: Guard) -> None:
    run = guard(lambda: train(Cell(), bad_sample=9))
    assert (run.first.cause, run.first.step) == ("nonfinite-input", 2)
    assert run.first.module == "prenet"
    assert run.first.evidence["name"] == "batch[0]"
    assert run.first.evidence["samples"] == [1]
    assert all(fix.verified for fix in run.first.fixes)


def test_parts_written_in_place_by_hand(guard: Guard) -> None:
    run = guard(lambda: train(Gates(), bad_sample=5))
    assert (run.first.cause, run.first.step, run.first.module) == ("nonfinite-input", 1, "prenet")


def test_good_frames_are_silent(guard: Guard) -> None:
    assert guard(lambda: train(Cell(), bad_sample=None)).causes == []
