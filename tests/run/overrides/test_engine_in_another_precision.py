"""A script that trains by `ampguard.Amp`, in another precision from outside: what is done and what is not is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampguard

STAYS = "the loss scale of ampguard.Amp stays on: it is the engine's own, and divided again"


class Net(nn.Module):
    """Notes the type that it computes in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 24), nn.Linear(24, 2)
        self.types: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        self.types.add(hidden.dtype)
        out: Tensor = self.second(hidden)
        return out


def train(precision: str, size: float = 1.0) -> tuple[Net, ampguard.Amp]:
    model = Net()
    amp = ampguard.Amp(model, torch.optim.AdamW(model.parameters(), 1e-2), precision, init_scale=256.0)
    for step in range(8):
        x = torch.randn(16, 6) * (size if step > 4 else 1.0)
        with amp.autocast():
            loss = nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long())
        amp.backward(loss)
        amp.step()
    return model, amp


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_loss_scale_that_stays_is_said(overridden: Callable[..., Any], precision: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    expected, _ = train(precision)
    torch.manual_seed(1)
    with overridden(precision) as session:
        model, amp = train("fp16")
    assert model.types == {dtype}
    assert amp.get_scale() == 256.0
    for p, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, other, rtol=1e-3, atol=1e-4)
    assert session.report.run["could_not"] == [STAYS]
    assert not [line for line in session.report.run["did"] if "Scaler" in line]
    assert session.report.incidents == ()


def test_bad_numbers_are_told_as_without_an_override(overridden: Callable[..., Any]) -> None:
    with overridden("bf16") as session:
        train("fp16", size=float("inf"))
    errors = [i for i in session.report.incidents if i.severity == "error"]
    assert [i.cause for i in errors] == ["nonfinite-input"]
