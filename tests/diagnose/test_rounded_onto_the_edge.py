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


class Actor(nn.Module):
    """A squashed action, and what it was before: as in SAC's replay of actions."""

    def __init__(self, squash: Function, undo: Function) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self._squash, self._undo = squash, undo

    def forward(self, x: Tensor) -> Tensor:
        action = self._squash(self.fc(x))
        return self._undo(action)


SQUASHED: dict[str, tuple[Function, Function]] = {
    "atanh": (torch.tanh, torch.atanh),
    "logit": (torch.sigmoid, torch.logit),
    "erfinv": (torch.erf, torch.erfinv),
}


def fails(name: str, dtype: torch.dtype, reach: float) -> None:
    """A training whose third batch makes the layer give `reach`."""
    torch.manual_seed(0)
    model = Actor(*SQUASHED[name])
    with torch.no_grad():
        model.fc.weight.copy_(torch.eye(4))
        model.fc.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for step in range(4):
        x = torch.full((2, 4), 0.5 if step != 2 else reach)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = model(x).float().pow(2).mean()
        if not torch.isfinite(loss):
            return
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "reach"), [("atanh", 5.0), ("logit", 9.0), ("erfinv", 2.9)])
def test_what_was_rounded_onto_the_end(guard: Guard, name: str, reach: float, dtype: torch.dtype) -> None:
    found = guard(lambda: fails(name, dtype, reach)).first
    assert (found.cause, found.step, found.evidence["end_of_domain"]) == ("fp16-underflow", 2, 1.0)
    assert found.op.startswith(f"aten.{name}")
    assert found.evidence["operand_fp32"] < 1.0
    clamps = [fix for fix in found.fixes if fix.action == "clamp"]
    assert clamps[0].verified, clamps
    assert ("0.999" if dtype is torch.float16 else "0.99)") in clamps[0].how


@pytest.mark.parametrize(("name", "reach"), [("atanh", 30.0), ("logit", 60.0), ("erfinv", 9.0)])
def test_what_is_at_the_end_in_float32_too(guard: Guard, name: str, reach: float) -> None:
    found = guard(lambda: fails(name, torch.float16, reach)).first
    assert (found.cause, found.step) == ("domain-error", 2)
    assert "in any precision" in found.explanation
