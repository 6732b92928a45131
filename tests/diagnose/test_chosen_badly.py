"""A code book under float16 autocast: codes that nothing chose lie beyond float16, and are chosen for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


class Quantizer(nn.Module):
    """Its codes are the averages of what chose them: with an epsilon in the divisor, those of nothing grow (rosinality's)."""

    def __init__(self, find: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.find = find
        self.register_buffer("codes", torch.randn(4, 16))

    def forward(self, x: Tensor) -> Tensor:
        far = x.pow(2).sum(1, keepdim=True) - 2 * x @ self.codes + self.codes.pow(2).sum(0, keepdim=True)
        found = nn.functional.embedding(self.find(far), self.codes.t())
        return x + (found - x).detach()


@pytest.mark.parametrize(
    ("find", "name"),
    [
        (lambda far: (-far).argmax(1), "argmax"),
        (lambda far: (-far).max(1)[1], "max"),
        (lambda far: far.min(dim=1).indices, "min"),
        (lambda far: far.argmin(1), "argmin"),
        (lambda far: (-far).topk(1, dim=1)[1].squeeze(1), "topk"),
        (lambda far: far.topk(1, dim=1, largest=False)[1].squeeze(1), "topk"),
    ],
)
def test_overflow_of_the_distances(find: Callable[[Tensor], Tensor], name: str, guard: Guard) -> None:
    def script() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), Quantizer(find), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(4):
            if step == 2:
                model[1].codes[:, 3:6] /= 1e-5
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(32, 4)).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(script)
    assert run.faults == 0, run.stderr
    first = run.first
    assert (first.cause, first.step, first.module) == ("fp16-overflow", 2, "1")
    assert first.location.code.startswith("far = x.pow(2)")
    assert f"{name} at test_chosen_badly.py:" in first.explanation
    assert (first.fixes[0].action, first.fixes[0].target, first.fixes[0].verified) == ("force-fp32", "1", True)


def test_a_choice_that_changes_nothing_is_not_told(guard: Guard) -> None:
    """The chosen rows are all too large to be summed up in float16, whichever is chosen."""

    def script() -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(4):
            with torch.autocast("cpu", torch.float16):
                out = model(torch.randn(32, 4))
                scores = out @ torch.full((4, 3), 1e4 if step < 2 else 7e4)
                rows = torch.randn(3, 4).abs() + (1.0 if step < 2 else 3e4)
                chosen = rows[scores.argmax(1)].half()
                loss = (torch.ones(1, 32) @ chosen).float().mean() + out.float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    first = guard(script).first
    assert (first.cause, first.step) == ("fp16-overflow", 2)
    assert first.location.code.startswith("loss = (torch.ones(1, 32) @ chosen)")
    assert "through a choice" not in first.explanation
