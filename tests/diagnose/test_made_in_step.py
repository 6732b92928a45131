"""Bad values that a script computes between two steps and copies to a buffer or a parameter, which the next step reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
Copy = Callable[["Centres", Tensor], None]


class Centres(nn.Module):
    """Compares features with the centres of classes, which are recomputed now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 4)
        self.register_buffer("centres", torch.randn(5, 4))
        self.centres: Tensor
        self.table = nn.Parameter(torch.zeros(5, 4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) @ (self.centres + self.table).t()

    @torch.no_grad()
    def refresh(self, x: Tensor, labels: Tensor, copy: Copy) -> None:
        sums = torch.zeros(5, 4).index_add_(0, labels, self.body(x).float())
        copy(self, sums / torch.bincount(labels, minlength=5).unsqueeze(1))


def to_buffer(model: Centres, values: Tensor) -> None:
    model.centres.copy_(values)


def to_data(model: Centres, values: Tensor) -> None:
    model.table.data.copy_(values)


def to_a_row(model: Centres, values: Tensor) -> None:
    model.centres[4] = values[4]


def train(copy: Copy) -> None:
    torch.manual_seed(0)
    model = Centres()
    opt = torch.optim.SGD(model.body.parameters(), 1e-3)
    for it in range(8):
        x, labels = torch.randn(16, 6), torch.randint(5 if it < 4 else 4, (16,))
        if it % 2 == 0:
            labels[:4] = torch.arange(4)
            labels[4:8] = 4 if it < 4 else 3
            model.refresh(x, labels, copy)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x).float(), labels)
        opt.zero_grad()
        loss.backward()
        opt.step()


@pytest.mark.parametrize("copy", [to_buffer, to_a_row])
def test_what_made_them(copy: Copy, guard: Guard) -> None:
    run = guard(lambda: train(copy))
    first = run.first
    assert (run.faults, run.causes, first.step) == (0, ["division-by-zero"], 4)
    assert (first.op, first.module, first.phase) == ("aten.div.Tensor", None, "forward")
    assert "torch.bincount" in first.location.code
    assert first.evidence["written_to"] == "centres"
    assert "1 of 5 divisors is 0" in first.explanation
    assert "to the buffer `centres`, and" in first.explanation
    repairs = [fix for fix in first.fixes if "bincount" in fix.how]
    assert repairs
    assert {fix.verified for fix in repairs} == {True if copy is to_buffer else None}


def test_written_past_the_buffer_itself(guard: Guard) -> None:
    run = guard(lambda: train(to_data))
    assert (run.faults, run.causes, run.first.step) == (0, ["division-by-zero"], 4)
    assert "torch.bincount" in run.first.location.code
