"""A script that ends with an error which has nothing to do with numbers, and has values at hand that it wrote as NaN."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from watching import seed_everything

import ampguard

NAN, INF = float("nan"), float("inf")


class UnrelatedError(Exception):
    pass


def filled(x: Tensor, model: nn.Module) -> list[Tensor]:
    return [torch.full((3,), NAN), torch.full_like(x, INF), torch.empty(4).fill_(NAN), x.new_full((2,), -INF)]


def plain_numbers(x: Tensor, model: nn.Module) -> list[Tensor]:
    best = torch.tensor(INF)
    return [torch.tensor([NAN, 1.0]), best, torch.minimum(torch.tensor(INF), best)]


def written_into(x: Tensor, model: nn.Module) -> list[Tensor]:
    table = torch.zeros(3)
    table[1] = NAN
    whole = torch.full_like(x, NAN)
    whole[0] = x[0]
    return [table, whole]


def masked(x: Tensor, model: nn.Module) -> list[Tensor]:
    one = model(x).detach().masked_fill(x > 0, NAN).t().clone()
    other = torch.where(x > 0, x, torch.tensor(NAN))
    return [one, other, torch.cat([other, torch.where(x > 0, x, NAN)])[1:]]


def logarithm(x: Tensor, model: nn.Module) -> list[Tensor]:
    return [torch.log(model(x) - 100)]


def logarithm_beside_a_constant(x: Tensor, model: nn.Module) -> list[Tensor]:
    return [torch.where(x > 0, torch.log(x - 100), NAN)]


def logarithm_of_a_constant(x: Tensor, model: nn.Module) -> list[Tensor]:
    return [torch.full((3,), -1.0).log()]


@pytest.mark.parametrize(
    ("make", "causes"),
    [
        (filled, []),
        (plain_numbers, []),
        (written_into, []),
        (masked, []),
        (logarithm, ["domain-error"]),
        (logarithm_beside_a_constant, ["domain-error"]),
        (logarithm_of_a_constant, ["domain-error"]),
    ],
)
def test_only_what_was_computed_is_told(
    tmp_path: Path, make: Callable[[Tensor, nn.Module], list[Tensor]], causes: list[str]
) -> None:
    def train() -> None:
        seed_everything()
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            x = torch.randn(4, 4)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        made = make(x, model)
        first, middle, last = made[0], made[len(made) // 2], made[-1]
        raise UnrelatedError(len((first, middle, last)))

    with pytest.raises(UnrelatedError), ampguard.watch(out=tmp_path / "run") as session:
        train()
    assert session.report is not None
    assert [incident.cause for incident in session.report.incidents] == causes
