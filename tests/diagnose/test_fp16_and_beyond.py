"""Exponentials that float16 cannot hold, where float32 holds all of them, some, or none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from watching import Watched


class Attention(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.qk = nn.Linear(8, 16, bias=False)
        self.gain = gain
        nn.init.constant_(self.qk.weight, 0.25)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).chunk(2, -1)
        w = (q @ k.mT * self.gain).exp()
        return x + (w / w.sum(-1, keepdim=True)) @ x


def cause_and_fixes(
    gains: tuple[float, float], guard: Callable[..., Watched]
) -> tuple[Watched, dict[str, bool | None]]:
    model = nn.Sequential(Attention(gains[0]), Attention(gains[1]))

    def body() -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.ones(2, 5, 8)).float().mean()
        loss.backward()

    run = guard(body)
    return run, {fix.action: fix.verified for fix in run.first.fixes}


def test_float32_holds_it(guard: Callable[..., Watched]) -> None:
    run, fixes = cause_and_fixes((0.5, 0.01), guard)
    assert run.first.cause == "fp16-overflow"
    assert "no cure" not in run.first.explanation
    assert fixes == {"stable-form": True, "force-fp32": True, "use-bf16": True, "disable-amp": True}


def test_float32_fails_further_on(guard: Callable[..., Watched]) -> None:
    """Another precision would only move the failure; the stable form cures both."""
    run, fixes = cause_and_fixes((0.5, 6.0), guard)
    assert (run.first.cause, run.first.module) == ("fp16-overflow", "0")
    assert run.first.explanation.endswith(" Float32 alone is no cure: there exp in module 1 gives +Inf.")
    assert fixes == {"stable-form": True, "force-fp32": False, "use-bf16": False, "disable-amp": False}


class Spread(nn.Module):
    """Its first exponential fits float32 and its last does not: float16 can hold neither."""

    def __init__(self, top: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(12.0, top, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale.to(x.dtype)).exp()


@pytest.mark.parametrize(("top", "cause"), [(80.0, "fp16-overflow"), (120.0, "overflow")])
def test_elements_of_one_operator(top: float, cause: str, guard: Callable[..., Watched]) -> None:
    model = Spread(top)
    run = guard(lambda: model(torch.ones(2, 4).half()).float().log().mean().backward())
    assert run.first.cause == cause
    assert any(fix.verified for fix in run.first.fixes)
