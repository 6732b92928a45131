"""Outputs of an evaluation on a device: whether they are finite is known a little later than they are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from watching import Watched

from ampguard.capture.flags import FiniteFlag
from ampguard.capture.judging import outputs


@pytest.fixture(params=[1, 2, 3])
def answers_late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device answers when it has been asked so many times."""

    class LateFlag(FiniteFlag):
        def __init__(self, tensors: Sequence[Tensor]) -> None:
            super().__init__(tensors)
            self.asked = 0

        @property
        def is_known(self) -> bool:
            self.asked += 1
            return self.asked > request.param

    monkeypatch.setattr(outputs, "FiniteFlag", LateFlag)
    monkeypatch.setattr(outputs, "is_immediate", lambda tensor: False)


def evaluate(constant: float) -> Callable[[], None]:
    def body() -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).eval()
        with torch.no_grad():
            for _ in range(5):
                (model(torch.randn(3, 4) * constant).argmax(1) == 0).sum().item()

    return body


@pytest.mark.usefixtures("answers_late")
def test_finite_outputs_are_no_incident(guard: Callable[..., Watched]) -> None:
    assert not guard(evaluate(1.0)).report.incidents


@pytest.mark.usefixtures("answers_late")
def test_bad_outputs_are(guard: Callable[..., Watched]) -> None:
    incident = guard(evaluate(float("inf"))).first
    assert (incident.cause, incident.mode) == ("nonfinite-input", "eval")
