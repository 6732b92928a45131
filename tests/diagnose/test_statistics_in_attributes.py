"""Statistics that a module keeps in plain attributes and writes to in place: the step that spoils them is told, as of buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


class Gathers(nn.Module):
    """Sums of squares of what it sees; only an evaluation reads them."""

    def __init__(self, is_lazy: bool) -> None:
        super().__init__()
        self.square = None if is_lazy else torch.zeros(16, dtype=torch.float16)
        self.count = 0

    @torch.no_grad()
    def observe(self, hidden: Tensor) -> None:
        added = hidden.square().sum(0)
        if self.square is None:
            self.square = added
        else:
            self.square += added  # <- here
        self.count += len(hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.observe(hidden.detach())
            return hidden
        return hidden / (self.square / self.count).sqrt()


def train(module: nn.Module, gain: float = 30.0, steps: int = 12, evaluates: bool = True) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), module, nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for step in range(steps):
        model.train()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(gain * torch.randn(32, 8)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if evaluates and step % 4 == 3:
            model.eval()
            with torch.no_grad():
                print(model(gain * torch.randn(4, 8)).mean().item())


@pytest.mark.parametrize("is_lazy", [True, False])
def test_the_line_that_spoils_it_is_told_in_its_step(is_lazy: bool, guard: Guard) -> None:
    run = guard(lambda: train(Gathers(is_lazy)))
    assert run.faults == 0
    (incident,) = [i for i in run.report.incidents if i.severity == "error"]
    assert (incident.cause, incident.mode, incident.op) == ("fp16-overflow", "train", "aten.add_.Tensor")
    assert "# <- here" in incident.location.code
    assert 0 < incident.step < 11


class Scratch(nn.Module):
    """Writes Inf to what it keeps, on purpose, and only reads what it has put over it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.room = torch.zeros(32, 16)
        self.best = torch.full((), torch.inf)
        self.last = None

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weights(x.detach().float()).to(x.dtype)

    @torch.no_grad()
    def weights(self, x: Tensor) -> Tensor:
        if self.way == "filled":
            self.room.fill_(-torch.inf)
            self.room[:, ::2] = x[:, ::2]
            return self.room.amax(1, keepdim=True)
        if self.way == "masked":
            self.room.copy_(x.masked_fill(x < 0, -torch.inf))
            return self.room.softmax(1)
        if self.way == "bound anew":
            self.last = x.masked_fill(x < 0, -torch.inf)
        else:
            self.best.fill_(torch.inf)
            torch.minimum(self.best, x.amin(), out=self.best)
        return torch.ones(())


@pytest.mark.parametrize("way", ["filled", "masked", "bound anew", "lowest"])
def test_infinities_that_are_meant(way: str, guard: Guard) -> None:
    run = guard(lambda: train(Scratch(way), gain=1.0, evaluates=False))
    assert run.faults == 0
    assert not run.report.incidents


def test_the_run_is_the_same(guard: Guard) -> None:
    def body() -> list[Tensor]:
        module = Gathers(True)
        train(module, steps=8)
        return [module.square.clone(), torch.get_rng_state()]

    unguarded = body()
    run = guard(body)
    assert all(torch.equal(a, b) for a, b in zip(unguarded, run.result, strict=True))


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.head(x - self.mean)


def test_what_a_bad_batch_leaves_in_it_is_that_batchs_doing(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), Centred())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for step in range(16):
            x = torch.randn(8, 4)
            if step == 7:
                x[2, 1] = torch.inf
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if loss.isfinite():
                optimizer.step()

    run = guard(body)
    assert run.faults == 0
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step, incident.location.code) == (
        "nonfinite-input",
        7,
        "loss = model(x).square().mean()",
    )
