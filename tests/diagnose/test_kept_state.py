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


class Codebook(nn.Module):
    """Its entries are averages over what was given to them, divided by how much that was (VQ-VAE)."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 2), nn.Linear(2, 4)
        self.register_buffer("entries", torch.tensor([[0.0, 0.0], [50.0, 50.0]]))
        self.register_buffer("counts", torch.ones(2))
        self.register_buffer("sums", torch.tensor([[0.0, 0.0], [50.0, 50.0]]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encode(x)
        near = torch.cdist(z, self.entries).neg().softmax(-1)
        taken, found = near.argmax(-1), near @ self.entries
        if self.training:
            with torch.no_grad():
                hot = nn.functional.one_hot(taken, 2).float()
                self.counts.mul_(0.5).add_(hot.sum(0), alpha=0.5)
                self.sums.mul_(0.5).add_(hot.T @ z, alpha=0.5)
                counts = torch.where(self.counts < 0.1, 0.0, self.counts)
                self.entries.copy_(self.sums / counts.unsqueeze(1))  # dead entry
        return self.decode(z + (found - z).detach()), nn.functional.mse_loss(z, found.detach())


def test_buffer_that_was_told_is_told_once_where_the_next_steps_read_it(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = Codebook()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for _ in range(12):
            x = torch.randn(8, 4)
            out, distance = model(x)
            loss = nn.functional.mse_loss(out, x) + distance
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    (only,) = guard(body).report.incidents
    assert (only.cause, only.step, only.evidence["poisoned_buffers"]) == ("division-by-zero", 3, ["entries"])
    assert only.evidence["later_failures_caused_by_it"] >= 2
