"""An optimizer of the script's own that divides by 0, in a loop without modules: its iteration, and what the script calls the
weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

Guard = Callable[..., Any]


class Normalised(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad / p.grad.norm(), alpha=-group["lr"])


@pytest.mark.parametrize("has_another", [False, True])
def test_the_iteration_and_the_name(guard: Guard, has_another: bool) -> None:
    def body() -> None:
        torch.manual_seed(0)
        params: dict[str, Any] = {
            "blocks": [{"w": (torch.randn(8, 8) * 0.3).requires_grad_()}],
            "head": (torch.randn(8, 8) * 0.3).requires_grad_(),
        }
        optimizers: list[Any] = [Normalised([params["blocks"][0]["w"]], 0.01)]
        if has_another:
            optimizers.append(torch.optim.AdamW([params["head"]]))

        def objective(x: Tensor) -> Tensor:
            y = torch.tanh(x @ params["blocks"][0]["w"]) @ params["head"]
            for block in params["blocks"][1:]:
                y = y + 0 * (x @ block["w"])
            return y.square().mean()

        for step in range(30):
            if step == 13:
                params["blocks"].append({"w": torch.randn(8, 8, requires_grad=True)})
                optimizers[0].add_param_group({"params": [params["blocks"][1]["w"]]})
            loss = objective(torch.randn(4, 8))
            if not torch.isfinite(loss):
                continue
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.step) == ("optimizer-underflow", 13)
    assert "`params['blocks'][1]['w']`" in run.first.explanation
    assert run.first.fixes[0].verified
