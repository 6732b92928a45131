"""Modules that are called with other weights than their own, which the step itself has computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from watching import Watched

STEPS = 6


@pytest.mark.parametrize(("tasks", "bad"), [(2, 4), (12, 0), (12, 4)])
def test_fast_weights_of_many_tasks_are_kept(tasks: int, bad: int, guard: Callable[..., Watched]) -> None:
    """MAML: the inner steps of earlier tasks are still behind the outer loss."""

    def adapted(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        fast = dict(model.named_parameters())
        for _ in range(2):
            loss = (functional_call(model, fast, (x,)) - y).pow(2).mean()
            grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {name: p - 0.05 * g for (name, p), g in zip(fast.items(), grads, strict=True)}
        return fast

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for step in range(STEPS):
            outer = torch.zeros(())
            for task in range(tasks):
                x = torch.linspace(-1, 1, 5)[:, None]
                y = torch.sin(x * (task + 1))
                out = functional_call(model, adapted(model, x, y), (x,))
                spread = torch.zeros(()) if step == bad and task == tasks - 1 else y.std()
                outer = outer + ((out - y) / spread).pow(2).mean()
            optimizer.zero_grad()
            outer.backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.step, run.first.op) == ("division-by-zero", bad, "aten.div.Tensor")
    assert run.first.location is not None
    assert run.first.location.code == "outer = outer + ((out - y) / spread).pow(2).mean()"
    assert run.first.fixes[0].verified
