"""An operand that low precision rounds onto the end of a function's domain, and that lies within it in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
Function = Callable[[Tensor], Tensor]

FUNCTIONS: dict[str, Function] = {
    "atanh": lambda x: torch.atanh(x.clamp(-1 + 1e-6, 1 - 1e-6)),
    "logit": lambda x: torch.logit(x.clamp(1e-3, 1 - 1e-6)),
    "log1p": lambda x: torch.log1p(-(x.abs().clamp(max=1 - 1e-6))),
    "erfinv": lambda x: torch.erfinv(x.clamp(-1 + 1e-6, 1 - 1e-6)),
}


class Model(nn.Module):
    def __init__(self, function: Function, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function, self.dtype = function, dtype

    def forward(self, x: Tensor, action: Tensor) -> Tensor:
        return self.layer(x) * self.function(action.to(self.dtype))


def train(function: Function, dtype: torch.dtype, largest: float) -> None:
    torch.manual_seed(0)
    model = Model(function, dtype)
    opt = torch.optim.SGD(model.parameters(), 1e-3)
    for it in range(4):
        action = torch.rand(8, 4) * 0.8
        if it == 2:
            action[3, 1] = largest
        with torch.autocast("cpu", dtype=dtype if dtype is not torch.float32 else torch.bfloat16):
            loss = model(torch.randn(8, 4), action).float().square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_within_the_domain_in_float32(name: str, dtype: torch.dtype, guard: Guard) -> None:
    run = guard(lambda: train(FUNCTIONS[name], dtype, 1.0))
    first = run.first
    assert (run.causes, first.step) == (["fp16-underflow"], 2)
    assert "FUNCTIONS" not in first.location.code
    assert first.location.code.strip().startswith(f'"{name}"')
    assert "was rounded away" in first.explanation
    assert next(fix for fix in first.fixes if fix.action == "clamp").verified
    assert next(fix for fix in first.fixes if fix.action == "disable-amp").verified


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_at_the_end_of_the_domain_in_any_precision(dtype: torch.dtype, guard: Guard) -> None:
    run = guard(lambda: train(torch.atanh, dtype, 1.0))
    assert run.causes == ["domain-error"]
