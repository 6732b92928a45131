"""A loss scale of the script's own that is divided out at first, and from some step on is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

Guard = Callable[..., Any]


def script(
    scale_at: Callable[[int], float], divisor_at: Callable[[int], float], has_masters: bool
) -> Callable[[], None]:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 3))
        masters = list(model.parameters())
        if has_masters:
            model.half()
            masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
        optimizer = torch.optim.SGD(masters, lr=1e-4)
        for step in range(24):
            optimizer.zero_grad()
            x = torch.randn(16, 8)
            out = model(x.half() if has_masters else x)
            loss = F.cross_entropy(out.float(), x[:, :3].argmax(1))
            (loss * scale_at(step)).backward()
            for master, p in zip(masters, model.parameters(), strict=True):
                assert p.grad is not None
                grad = p.grad.float() / divisor_at(step)
                p.grad = None
                master.grad = grad
            optimizer.step()
            for master, p in zip(masters, model.parameters(), strict=True):
                p.data.copy_(master.detach())

    return body


def of_two_kinds(step: int) -> float:
    """Scaled by 512 and divided, or weighted by 10 and not."""
    return 10.0 if step % 4 == 3 else 512.0


@pytest.mark.parametrize("has_masters", [False, True])
def test_division_that_is_left_out_late(guard: Guard, has_masters: bool) -> None:
    run = guard(script(lambda step: 512.0, lambda step: 512.0 if step < 8 else 1.0, has_masters))
    assert run.faults == 0, run.stderr
    assert run.causes == ["bypassed-scaler"]
    assert (run.first.step, run.first.evidence["factor"]) == (8, 512.0)
    assert run.first.location.code == "optimizer.step()"
    assert "own loss scale 512" in run.first.explanation


@pytest.mark.parametrize(
    ("scale_at", "divisor_at"),
    [
        (lambda step: 512.0, lambda step: 512.0),
        (lambda step: 10.0, lambda step: 1.0),
        (of_two_kinds, lambda step: 512.0 if of_two_kinds(step) == 512.0 else 1.0),
        (lambda step: 512.0 if step < 8 else 1.0, lambda step: 512.0 if step < 8 else 1.0),
    ],
)
@pytest.mark.parametrize("has_masters", [False, True])
def test_loops_that_divide_what_they_scale(guard: Guard, scale_at: Any, divisor_at: Any, has_masters: bool) -> None:
    run = guard(script(scale_at, divisor_at, has_masters))
    assert run.faults == 0, run.stderr
    assert run.causes == []


def two_optimizers(divided: tuple[int, ...], scale: float, weight: float = 1.0) -> Callable[[], None]:
    """One loss for both; `divided`: those whose gradients the script divides by the scale. Both step, the second first."""

    def body() -> None:
        torch.manual_seed(0)
        trunk, head = nn.Linear(8, 16), nn.Linear(16, 3)
        optimizers = [torch.optim.SGD(m.parameters(), lr=1e-5) for m in (trunk, head)]
        for _ in range(6):
            x = torch.randn(16, 8)
            loss = weight * F.cross_entropy(head(torch.relu(trunk(x))), x[:, :3].argmax(1))
            for optimizer in optimizers:
                optimizer.zero_grad()
            (loss * scale).backward()
            for number in divided:
                for p in optimizers[number].param_groups[0]["params"]:
                    p.grad.div_(scale)
            optimizers[1].step()
            optimizers[0].step()

    return body


@pytest.mark.parametrize("divided", [0, 1])
def test_division_that_is_made_for_one_of_two_optimizers(guard: Guard, divided: int) -> None:
    run = guard(two_optimizers((divided,), 1024.0))
    assert (run.faults, run.causes) == (0, ["bypassed-scaler"]), run.stderr
    assert (run.first.step, run.first.evidence["factor"]) == (0, 1024.0)
    assert run.first.location.code == f"optimizers[{1 - divided}].step()"
    assert "another optimizer holds were divided first" in run.first.explanation


@pytest.mark.parametrize(("divided", "scale"), [((0, 1), 1024.0), ((), 16.0), ((1,), 10.0)])
def test_two_optimizers_that_are_treated_alike_or_a_weight(guard: Guard, divided: Any, scale: float) -> None:
    run = guard(two_optimizers(divided, scale))
    assert (run.faults, run.causes) == (0, []), run.stderr
