"""A signal handler of the script's that raises while the guard works: the exception reaches the script."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import Tensor, nn

import ampguard
from ampguard.capture.barrier import FaultBarrier

ANSWERED: set[int] = set()


class TimeIsUpError(Exception):
    pass


def handler(signum: int, frame: FrameType | None) -> None:
    raise TimeIsUpError


class ByObject:
    def __call__(self, signum: int, frame: FrameType | None) -> None:
        handler(signum, frame)


@pytest.fixture(params=[handler, ByObject()])
def installed(request: pytest.FixtureRequest) -> Iterator[object]:
    before = signal.signal(signal.SIGUSR1, request.param)
    yield request.param
    signal.signal(signal.SIGUSR1, before)


class Model(nn.Module):
    """Sends the signal as it is called once more in the same step: that is a replay."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.asked = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.asked in ANSWERED:
            signal.raise_signal(signal.SIGUSR1)
        ANSWERED.add(self.asked)
        return self.layer(x).square()


def test_in_a_replay(installed: object, tmp_path: Path) -> None:
    ANSWERED.clear()
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    done = 0
    with ampguard.watch(out=tmp_path / "run") as session:
        for step in range(8):
            model.asked += 1
            try:
                loss = torch.log(model(torch.ones(2, 4)) - (99 if step == 4 else -1)).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                done += 1
            except TimeIsUpError:
                assert step == 4
                break
    assert done == 4
    assert signal.getsignal(signal.SIGUSR1) is installed
    assert session.report.steps == 4


def test_in_what_the_guard_does_itself(installed: object) -> None:
    faults: list[Exception] = []
    barrier = FaultBarrier(faults.append)
    with pytest.raises(TimeIsUpError):
        barrier.call(barrier.call, signal.raise_signal, signal.SIGUSR1)
    assert not faults
    assert not barrier.tripped
    assert barrier.call(int, "no number") is None
    assert barrier.tripped
