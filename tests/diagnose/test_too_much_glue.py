"""A quick step that runs more operators outside modules than are recorded: what is not known is not claimed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from watching import Watched, seed_everything

from ampguard.capture import schedule

Guard = Callable[..., Watched]


@pytest.mark.parametrize("is_by_input", [True, False])
def test_why_it_is_unexplained(is_by_input: bool, guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "GLUE_TIME_SHARE", 0.0)  # however slow the machine is, the step is a quick one

    def body() -> None:
        seed_everything()
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(9):
            x = torch.randn(4, 3)
            x = x / (0 * x if is_by_input and step == 8 else x.std(0))
            out = model(x)
            state = torch.zeros(4, 3)
            for _ in range(100):
                state = 0.9 * state + 0.1 * out
            loss = (state if is_by_input or step < 8 else state / (0 * state)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    first = guard(body).first
    assert (first.cause, first.step) == ("unexplained", 8)
    assert "more operators outside modules than are recorded" in first.explanation
    assert first.evidence.get("inputs_are_finite") is not is_by_input
