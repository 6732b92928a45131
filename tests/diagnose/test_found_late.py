"""What is seen in some iterations only is told with the last one in which it was not so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

Guard = Callable[..., Any]


def reads_from(first: int) -> Callable[[], list[float]]:
    def body() -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        means = []
        for step in range(36):
            x = torch.randn(8, 6)
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(x)
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(out.float(), x[:, :3].argmax(1))).backward()
            if step >= first:
                assert model.weight.grad is not None
                means.append(model.weight.grad.abs().mean().item())
            scaler.step(optimizer)
            scaler.update()
        return means

    return body


@pytest.mark.parametrize(("first", "step", "before"), [(25, 25, 20), (16, 16, 10), (0, 0, None)])
def test_iteration_in_which_it_was_not_so(first: int, step: int, before: int | None, guard: Guard) -> None:
    run = guard(reads_from(first))
    assert run.faults == 0, run.stderr
    assert run.causes == ["clip-before-unscale"]
    assert (run.first.step, run.first.evidence.get("not_in_step")) == (step, before)
    assert ("It was not so yet in step" in run.first.explanation) == (before is not None)
