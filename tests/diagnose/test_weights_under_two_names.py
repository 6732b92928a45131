"""Weights that the script writes after the optimizer's step, read and written under different names (`.data`)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from watching import Watched, seed_everything

BAD, STEPS = 4, 6
Guard = Callable[..., Watched]


class Coder(nn.Module):
    """A sparse autoencoder whose directions are kept at unit length."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 12)
        self.decoder = nn.Parameter(torch.randn(12, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.encoder(x)) @ self.decoder


def by_data(coder: Coder) -> None:
    coder.decoder.data /= coder.decoder.data.norm(dim=1, keepdim=True)


def read_by_data(coder: Coder) -> None:
    with torch.no_grad():
        length = coder.decoder.data.norm(dim=1, keepdim=True)
        coder.decoder.div_(length)


def written_by_data(coder: Coder) -> None:
    with torch.no_grad():
        length = coder.decoder.norm(dim=1, keepdim=True)
    coder.decoder.data.div_(length)


@pytest.mark.parametrize("normalise", [by_data, read_by_data, written_by_data])
def test_directions_of_length_zero(normalise: Callable[[Coder], None], guard: Guard) -> None:
    """Step 3 ends with two directions that are 0 and have no gradient: the loss of step 4 is the first that is NaN."""

    def train() -> list[bytes]:
        seed_everything()
        coder = Coder()
        optimizer = torch.optim.SGD(coder.parameters(), lr=0.05)
        for number in range(STEPS):
            x = torch.randn(16, 6)
            loss = (coder(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if number == BAD - 1 and coder.decoder.grad is not None:
                coder.decoder.data[[3, 5]] = 0.0
                coder.decoder.grad[[3, 5]] = 0.0
            optimizer.step()
            normalise(coder)
        return [p.detach().numpy().tobytes() for p in coder.parameters()]

    plain = train()
    run = guard(train)
    assert run.result == plain
    first = run.first
    assert (first.step, first.cause, first.module) == (BAD, "division-by-zero", None)
    assert first.op == "aten.div_.Tensor"
    assert first.location is not None
    assert first.location.function == normalise.__name__
    assert first.fixes[0].verified
    assert not run.faults
