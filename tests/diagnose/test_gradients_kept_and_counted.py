"""Norms of scaled gradients that are kept in a list for later, and gradients that are counted between limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]
STEPS = 6


def make() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=256.0)


def backward(model: nn.Module, opt: Any, scaler: Any) -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(torch.randn(16, 6))
    opt.zero_grad()
    scaler.scale(out.float().square().mean()).backward()


def update(opt: Any, scaler: Any) -> None:
    scaler.step(opt)
    scaler.update()


def length(model: nn.Module) -> Any:
    return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()


def kept() -> tuple[list[Any], Any]:
    model, opt, scaler = make()
    norms = []
    for _ in range(STEPS):
        backward(model, opt, scaler)
        norms.append(length(model))
        update(opt, scaler)
    return norms, scaler


def shown_at_the_end() -> None:
    norms, _ = kept()
    print(f"mean norm {torch.stack(norms).mean().item():.3f}")


def divided_at_the_end() -> None:
    norms, scaler = kept()
    print(f"mean norm {torch.stack(norms).mean().item() / scaler.get_scale():.3f}")


def compared_with_each_other() -> None:
    model, opt, scaler = make()
    norms = []
    for _ in range(STEPS):
        backward(model, opt, scaler)
        norms.append(length(model))
        update(opt, scaler)
        if norms[-1] > 100 * norms[0]:
            break


def of_true_ones() -> None:
    model, opt, scaler = make()
    norms = []
    for _ in range(STEPS):
        backward(model, opt, scaler)
        scaler.unscale_(opt)
        norms.append(length(model))
        update(opt, scaler)
    print(f"mean norm {torch.stack(norms).mean().item():.3f}")


def test_norms_that_are_kept_for_later(guard: Guard) -> None:
    run = guard(shown_at_the_end)
    assert (run.faults, run.causes) == (0, ["clip-before-unscale"]), run.stderr
    assert (run.first.step, run.first.severity) == (0, "warning")
    assert run.first.location.code.startswith("return torch.stack(") or "norms.append" in run.first.location.code


@pytest.mark.parametrize("body", [divided_at_the_end, compared_with_each_other, of_true_ones])
def test_norms_that_are_kept_and_divided(body: Any, guard: Guard) -> None:
    run = guard(body)
    assert (run.faults, run.causes) == (0, []), run.stderr


def counting(of: Callable[[Any, Any], Any]) -> Callable[[], None]:
    def body() -> None:
        model, opt, scaler = make()
        kept = []
        for _ in range(STEPS):
            backward(model, opt, scaler)
            kept.append(of(model[0].weight.grad, 256.0).tolist())
            update(opt, scaler)

    return body


@pytest.mark.parametrize(
    "of",
    [lambda g, scale: torch.histc(g.flatten(), 8, -1.0, 1.0), lambda g, scale: g.float().histc(bins=8, min=0, max=1)],
)
def test_limits_for_true_gradients(of: Any, guard: Guard) -> None:
    run = guard(counting(of))
    assert (run.faults, run.causes, run.first.step) == (0, ["clip-before-unscale"], 0), run.stderr


@pytest.mark.parametrize(
    "of",
    [
        lambda g, scale: torch.histc(g, 8),
        lambda g, scale: torch.histc(g / g.abs().max(), 8, -1.0, 1.0),
        lambda g, scale: torch.histc(g / scale, 8, -1.0, 1.0),
    ],
)
def test_limits_of_their_own_or_of_a_share(of: Any, guard: Guard) -> None:
    run = guard(counting(of))
    assert (run.faults, run.causes) == (0, []), run.stderr
