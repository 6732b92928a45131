"""A queue, a centre: what a failing step makes of them spoils the next one, which is no second incident."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from watching import Watched, fingerprint, seed_everything

Guard = Callable[..., Watched]
STEPS, BAD, ROWS, DIM = 10, 5, 4, 3
LINE = "keys = keys / keys.norm(dim=1, keepdim=True)"


class Queue:
    """Rows of a tensor, written in place behind their use."""

    def __init__(self) -> None:
        self.keys, self.at = functional.normalize(torch.randn(2 * ROWS, DIM), dim=1), 0

    def similar(self, queries: Tensor) -> Tensor:
        return queries @ self.keys.clone().T

    def put(self, keys: Tensor) -> None:
        self.keys[self.at : self.at + ROWS] = keys
        self.at = (self.at + ROWS) % len(self.keys)


class Centre:
    """A mean that goes on as a new tensor in every step."""

    def __init__(self) -> None:
        self.mean = torch.zeros(DIM)

    def similar(self, queries: Tensor) -> Tensor:
        return queries - self.mean

    def put(self, keys: Tensor) -> None:
        self.mean = 0.9 * self.mean + 0.1 * keys.mean(0)


def batches(blank: int | None = BAD, unfit: int | None = None) -> Iterator[Tensor]:
    for step in range(STEPS):
        x = torch.randn(ROWS, 5)
        if step == blank:
            x[2] = 0.0
        if step == unfit:
            x[1, 1] = float("nan")
        yield x


def trained(kind: type, data: Callable[[], Any]) -> dict[str, Any]:
    seed_everything()
    encoder, slow = nn.Linear(5, DIM, bias=False), nn.Linear(5, DIM, bias=False).requires_grad_(False)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.01)
    state = kind()
    for x in data():
        with torch.no_grad():
            keys = slow(x)
            keys = keys / keys.norm(dim=1, keepdim=True)
        queries = encoder(x)
        loss = state.similar(queries).square().mean() + (queries * keys).sum(1).mean()
        state.put(keys)
        if not torch.isfinite(loss):
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return fingerprint(encoder, optimizer)


@pytest.mark.parametrize("kind", [Queue, Centre])
def test_what_it_spoils_is_told_once_with_its_line(guard: Guard, kind: type) -> None:
    plain = trained(kind, batches)
    run = guard(lambda: trained(kind, batches))
    assert run.faults == 0, run.stderr
    assert run.result == plain
    assert run.causes == ["division-by-zero"]
    assert run.first.step == BAD
    assert run.first.location is not None
    assert run.first.location.code == LINE
    assert run.first.fixes[0].verified


def test_a_bad_batch_right_after_it_is_another_one(guard: Guard) -> None:
    def loader() -> Any:
        return torch.utils.data.DataLoader(list(batches(BAD, BAD + 1)), batch_size=None)

    def body() -> None:
        trained(Forgetful, loader)

    class Forgetful(Centre):
        def put(self, keys: Tensor) -> None:
            pass

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert sorted(run.causes) == ["division-by-zero", "nonfinite-input"]
