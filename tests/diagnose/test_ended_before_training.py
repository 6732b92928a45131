"""Scripts that refuse numbers before their first step, or end in it: told with the line that made them bad."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ampguard
from ampguard.incident import Report


def ended(script: Callable[[], None], out: Path) -> Report:
    with pytest.raises((ValueError, RuntimeError, IndexError)), ampguard.watch(out=out) as session:
        script()
    assert session.report is not None
    return session.report


def divided(values: Tensor, spread: Tensor) -> Tensor:
    return values / spread


def checked() -> None:
    x = torch.randn(16, 4)
    x[:, 2] = 3.0
    x = divided(x - x.mean(0), x.std(0))
    if not torch.isfinite(x).all():
        raise ValueError("the features are not finite")


def distribution() -> None:
    spread = divided(torch.zeros(3), torch.tensor([1.0, 0.0, 2.0]))
    torch.distributions.Normal(torch.zeros(3), spread, validate_args=True)  # (a library may have switched that off)


def factors() -> None:
    weight = torch.zeros(4, 4)
    torch.linalg.svd(divided(weight, weight.norm()))


@pytest.mark.parametrize("script", [checked, distribution, factors])
def test_numbers_that_are_refused_before_the_first_step(script: Callable[[], None], tmp_path: Path) -> None:
    (incident,) = ended(script, tmp_path / "run").incidents
    assert (incident.cause, incident.step, incident.mode, incident.phase) == ("division-by-zero", 0, "train", "data")
    assert incident.location is not None
    assert incident.location.code == "return values / spread"
    assert incident.fixes[0].verified


def unseen_words() -> None:
    counts = torch.tensor([3.0, 0.0, 2.0])
    scores = torch.log(counts / counts.sum())
    raise ValueError(f"the number of steps must be finite, and there are {len(scores)} scores")


def other_error() -> None:
    rates = divided(torch.zeros(2), torch.zeros(2))
    raise RuntimeError(f"no such file, for {len(rates)} rates")


@pytest.mark.parametrize("script", [unseen_words, other_error])
def test_errors_about_something_else(script: Callable[[], None], tmp_path: Path) -> None:
    assert ended(script, tmp_path / "run").status == "clean"


def buckets() -> None:
    """NaN as an index is out of every range: the model raises before it returns anything."""
    table, head = nn.Embedding(32, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*table.parameters(), *head.parameters()], 1e-2)
    for step in range(7):
        price = torch.rand(16) if step < 5 else torch.full((16,), 3.0)
        bucket = divided(price - price.min(), price.max() - price.min()).mul(31).round().long()
        loss = head(table(bucket)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_an_index_that_was_nan(tmp_path: Path) -> None:
    (incident,) = ended(buckets, tmp_path / "run").incidents
    assert (incident.cause, incident.step, incident.mode) == ("division-by-zero", 5, "train")
    assert incident.location is not None
    assert incident.location.code == "return values / spread"
