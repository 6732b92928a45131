"""Writes to the tensors of a list are counted while operators are taped, as they are without a guard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from watching import Watched

Guard = Callable[..., Watched]


def versions() -> list[int]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 3)).square().mean()
        kept = [torch.ones(2), torch.ones(3)]
        torch._foreach_mul_(kept, 2.0)
        torch._foreach_add_(kept, [loss.detach(), loss.detach()])
        (loss * kept[0].sum()).backward()
        grads: list[Any] = [p.grad for p in model.parameters()]
        torch._foreach_mul_(grads, 0.5)
        found += [t._version for t in (*kept, *grads)]
        optimizer.step()
    return found


def test_versions_are_those_of_an_unguarded_run(guard: Guard) -> None:
    plain = versions()
    assert set(plain) != {0}
    assert guard(versions).result == plain


def test_a_graph_still_notices_that_what_it_kept_was_written_to(guard: Guard) -> None:
    def body() -> str:
        weight = torch.ones(3, requires_grad=True)
        torch.optim.SGD([weight], lr=0.1)
        kept = torch.ones(3)
        loss = (weight * kept).sum()
        torch._foreach_zero_([kept])
        with pytest.raises(RuntimeError) as error:
            loss.backward()
        return str(error.value)

    assert "modified by an inplace operation" in guard(body).result
