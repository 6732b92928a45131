"""An epsilon that float16 does not have, in a step that cannot be run again: what is seen as it runs tells it from no epsilon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import Watched

Guard = Callable[..., Watched]
Norm = Callable[[Tensor], Tensor]

VANISHING: dict[str, Norm] = {
    "added": lambda x: x * torch.rsqrt((x * x).mean(1, keepdim=True) + 1e-8),
    "added last": lambda x: x / (x.norm(dim=1, keepdim=True) + 1e-8),
    "clamped": lambda x: x / x.norm(dim=1, keepdim=True).clamp(min=1e-8),
    "of a logarithm": lambda x: torch.log(x.abs() + 1e-8),
}


class Head(nn.Module):
    """Takes its batch from a generator, which a replay cannot do."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 6, bias=False)
        self.norm = norm

    def forward(self, rows: Any) -> Tensor:
        return self.norm(self.fc(torch.stack(list(rows))))


def evaluate(norm: Norm) -> Callable[[], None]:
    def body() -> None:
        torch.manual_seed(0)
        model = Head(norm).half().eval()
        with torch.no_grad():
            for _ in range(4):
                x = torch.randn(5, 4).half()
                x[2] = 0.0
                model(row for row in x)

    return body


@pytest.mark.parametrize("how", VANISHING)
def test_an_epsilon_that_float16_rounds_to_zero(how: str, guard: Guard) -> None:
    run = guard(evaluate(VANISHING[how]))
    assert (run.faults, run.causes) == (0, ["fp16-underflow"]), run.stderr
    assert run.first.evidence["rung"] == "live-trace"
    assert run.first.evidence["operand_fp32"] == pytest.approx(1e-8)


def test_no_epsilon_at_all(guard: Guard) -> None:
    run = guard(evaluate(lambda x: x * torch.rsqrt((x * x).mean(1, keepdim=True))))
    assert (run.faults, run.causes) == (0, ["division-by-zero"]), run.stderr
    assert run.first.evidence["rung"] == "live-trace"
    assert "float32" not in run.first.explanation, "nobody has seen it in float32"


def test_an_epsilon_that_is_cancelled(guard: Guard) -> None:
    """It is there in float16, and what it was added to took it away."""
    run = guard(evaluate(lambda x: x / ((x * x).mean(1, keepdim=True) + 1e-2 - 1e-2)))
    assert run.causes == ["division-by-zero"]


def test_one_that_float16_has(guard: Guard) -> None:
    assert not guard(evaluate(lambda x: x * torch.rsqrt((x * x).mean(1, keepdim=True) + 1e-3))).report.incidents
