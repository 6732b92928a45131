"""Parts of a model that join when their want of gradients has been told already: it is taken back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from watching import Watched, seed_everything

Guard = Callable[..., Watched]
JOINS = 270
"""After it has been told live."""


class Staged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.late, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)


def train(kinds: list[set[str]], steps: int = 300, joins: int = JOINS) -> None:
    """As many models as kinds, each with an optimizer of its parts of these names; `late` joins late in the first."""
    seed_everything()
    models = [Staged() for _ in kinds]
    optimizers = [
        torch.optim.SGD([p for name in sorted(parts) for p in getattr(model, name).parameters()], lr=0.01)
        for model, parts in zip(models, kinds, strict=True)
    ]
    for step in range(steps):
        x = torch.randn(2, 4)
        loss = torch.zeros(())
        for model in models:
            hidden = model.body(x)
            loss = loss + (model.late(hidden) if step >= joins and model is models[0] else hidden).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


def test_all_that_was_told_joins(guard: Guard) -> None:
    run = guard(lambda: train([{"body", "late"}]))
    assert run.faults == 0, run.stderr
    assert run.causes == []
    assert run.report.status == "clean"
    assert "unused-parameters, told of step 0, is taken back" in run.stderr


@pytest.mark.parametrize(("joins", "count"), [(JOINS, 2), (1000, 4)])
def test_what_is_left_of_it(joins: int, count: int, guard: Guard) -> None:
    run = guard(lambda: train([{"body", "late", "never"}], joins=joins))
    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step, incident.occurrences) == ("unused-parameters", 0, 1)
    assert f"{count} of the 6 parameters" in incident.explanation
    assert ("late" in incident.explanation) == (count == 4)


@pytest.mark.parametrize("joins", [JOINS, 1000])
def test_one_of_two_optimizers(joins: int, guard: Guard) -> None:
    run = guard(lambda: train([{"body", "late"}, {"body", "never"}], joins=joins))
    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert incident.cause == "unused-parameters"
    assert "`never.weight`" in incident.explanation
    assert ("optimizers[0]" in incident.explanation) == (joins == 1000)
    assert incident.occurrences == (1 if joins == JOINS else 2)
