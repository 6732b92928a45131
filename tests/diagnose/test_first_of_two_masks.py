"""A sample that is masked altogether, in two attentions one behind the other: the first is told."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampguard.diagnose.locate.chain import Chain, Link
from ampguard.diagnose.locate.slicing import _ranked
from ampguard.numerics import NAN, NEG_INF

Guard = Callable[..., Any]


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, hidden: Tensor) -> Tensor:
        scores = q @ k.transpose(1, 2)
        scores = scores.masked_fill(hidden[:, None, :], float("-inf"))
        return torch.softmax(scores, dim=-1) @ k


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.encoder = Attention()
        self.decoder = Attention()
        self.queries = nn.Parameter(torch.randn(2, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        x = self.inner(x)
        x = self.encoder(x, x, hidden)
        out: Tensor = self.head(self.decoder(self.queries.expand(len(x), -1, -1), x, hidden))
        return out


def run_through(trains: bool) -> None:
    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(6):
        hidden = torch.rand(4, 5) < 0.3
        hidden[:, 0] = False
        hidden[2] |= step == 4
        if trains or step != 4:
            loss = model(torch.randn(4, 5, 8), hidden).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        else:
            with torch.no_grad():
                print(model.eval()(torch.randn(4, 5, 8), hidden).argmax(-1).tolist())
            model.train()


@pytest.mark.parametrize("trains", [True, False])
def test_the_first_is_told(guard: Guard, trains: bool) -> None:
    run = guard(lambda: run_through(trains))
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.step, run.first.module) == ("masked-softmax", 4, "encoder")


def masked_at(index: int) -> Chain:
    """Masked by one operator, made NaN by the next."""
    mask, softmax = (
        SimpleNamespace(index=i, short_name=name) for i, name in ((index, "fill"), (index + 1, "_softmax"))
    )
    links: list[Any] = [Link(softmax, 0, None, NAN), Link(mask, 0, None, NEG_INF)]  # type: ignore[arg-type]
    return Chain(links, intended=True)


def test_of_two_ways_back_the_earlier_one_is_kept() -> None:
    first, second = masked_at(3), masked_at(20)
    for chains in ((first, second), (second, first)):
        best, fallback = None, None
        for chain in chains:
            best, fallback = _ranked(best, fallback, chain)
        assert best is None
        assert fallback is first
