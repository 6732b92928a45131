"""Casts that a script makes by itself outside modules: they stay when autocast goes, and a fix must name them."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampguard.capture.record import Line
from ampguard.diagnose.fixes.script_casts import casts

Guard = Callable[..., Any]


def likelihood_with_cast(mean: Tensor, log_scale: Tensor, y: Tensor) -> Tensor:
    variance = (2 * log_scale).half().exp()
    return (0.5 * (y - mean) ** 2 / variance.float() + log_scale.float()).mean()


def likelihood_with_cast_before(mean: Tensor, log_scale: Tensor, y: Tensor) -> Tensor:
    shown = mean.half()
    log_scale = log_scale.to(torch.float16)
    assert shown.isfinite().all()
    variance = (2 * log_scale).exp()
    return (0.5 * (y - mean) ** 2 / variance.float() + log_scale.float()).mean()


def likelihood_without(mean: Tensor, log_scale: Tensor, y: Tensor) -> Tensor:
    variance = torch.mul(log_scale, 2).exp()
    return (0.5 * (y - mean) ** 2 / variance.float() + log_scale.float()).mean()


def fixes(guard: Guard, likelihood: Callable[[Tensor, Tensor, Tensor], Tensor], shift: float = 12.0) -> dict[str, Any]:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        for step in range(3):
            with torch.autocast("cpu", torch.float16):
                out = net(torch.randn(6, 4))
                mean, log_scale = out[:, 0], out[:, 1] - (shift if step == 2 else 0)
                loss = 1e-4 * likelihood(mean.float(), log_scale, torch.randn(6))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    first = guard(body).first
    assert (first.cause, first.step, first.op) == ("fp16-underflow", 2, "aten.div.Tensor")
    return {fix.action: fix for fix in first.fixes}


@pytest.mark.parametrize(
    ("likelihood", "code"),
    [
        (likelihood_with_cast, "variance = (2 * log_scale).half().exp()"),
        (likelihood_with_cast_before, "log_scale = log_scale.to(torch.float16)"),
    ],
)
def test_a_cast_that_ran_no_operator_is_named(
    likelihood: Callable[[Tensor, Tensor, Tensor], Tensor], code: str, guard: Guard
) -> None:
    found = fixes(guard, likelihood)
    assert found["disable-amp"].verified
    assert found["disable-amp"].how.endswith(f"and float32 in place of the script's own casts in: {code}")
    assert found["use-bf16"].verified
    assert found["use-bf16"].how.endswith(f"and bfloat16 in place of the script's own casts in: {code}")


def test_without_a_cast_none_is_named(guard: Guard) -> None:
    found = fixes(guard, likelihood_without)
    assert not any("own cast" in fix.how for fix in found.values())
    assert not any("GradScaler" in fix.how for fix in found.values())  # the script has none


def test_the_line_that_made_the_zero_is_computed_in_float32(guard: Guard) -> None:
    fix = fixes(guard, likelihood_with_cast, shift=9.5)["force-fp32"]
    assert fix.verified
    assert fix.how == (
        'with torch.autocast("cpu", enabled=False): variance = (2 * log_scale).half().exp()'
        "  # on .float() operands, without its cast to float16"
    )


@pytest.mark.parametrize(
    ("text", "does"),
    [
        ("y = x.half()", True),
        ("y = x.to(dtype=torch.float16) * 2", True),
        ("y = x.to('cpu', torch.bfloat16)", True),
        ("y = torch.zeros(3, dtype=torch.half)", True),
        ("y = f(x.type(torch.HalfTensor))", True),
        ("with torch.autocast('cpu', dtype=torch.float16): y = net(x)", False),
        ("y = x.to(device)", False),
        ("half = x.float()", False),
    ],
)
def test_casts_are_told_from_the_text(text: str, does: bool) -> None:
    ast.parse(text)
    name = f"<{text}>"
    linecache.cache[name] = (len(text), None, [text + "\n"], name)
    assert casts(Line(compile(text, name, "exec"), 1)) is does
