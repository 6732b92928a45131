"""Optimizers that compute the loss themselves, several times in one step (LBFGS)."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from ampguard.engine import misuse
from ampguard.engine.holding import Holding
from ampguard.engine.precision.base import Precision
from ampguard.engine.setup import parameters_of
from ampguard.engine.step import check_gradients
from ampguard.errors import LossError, SetupError

NO_STEP_WITHOUT = ("LBFGS",)


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether it cannot step without one."""
    return _needs_closure(type(optimizer))  # type: ignore[arg-type]


@functools.cache
def _needs_closure(kind: type[Optimizer]) -> bool:
    if issubclass(kind, LBFGS) or kind.__name__ in NO_STEP_WITHOUT:
        return True
    try:
        wanted = list(inspect.signature(kind.step).parameters.values())[1:]
    except (AttributeError, TypeError, ValueError):
        return False
    return any(p.name == "closure" and p.default is inspect.Parameter.empty for p in wanted)


def refusal(name: str, mode: Precision) -> SetupError:
    """Why this mode cannot step with a closure."""
    why = (
        "it evaluates the loss several times in one step, and would compare gradients whose loss scales may differ"
        if mode.scales_loss
        else "it would evaluate the loss on weights that are rounded only after the step"
    )
    return SetupError(f"`{name}` with a closure in {mode.name}: {why}\n  do    use precision='bf16' or 'fp32'")


def step_with_closure(
    holding: Holding,
    closure: Callable[[], Any],
    max_norm: float | None,
    clear: Callable[[], None],
    evaluated: Callable[[Holding], None],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Let the optimizer step; if any of it was not finite, everything is put back.

    `clear` forgets the gradients before each evaluation, whether the closure does or not: they would add up over all of them.
    `evaluated` is called with the gradients of each evaluation, and raises where they are not what they should be.
    Returns the first gradient norm, whether it was undone (0.0 or 1.0), and the losses. Waits for the device.
    """
    optimizer = holding.optimizer
    before = [p.detach().clone() for p in holding.parameters]
    state = copy.deepcopy(optimizer.state_dict())
    norms: list[Tensor] = []
    losses: list[Tensor] = []

    def evaluate() -> Any:
        clear()
        loss = closure()
        if not holding.has_gradients():
            raise misuse.never_differentiated(holding.name, False)
        if loss is None:
            raise LossError(
                f"the closure of `{holding.name}` returned nothing\n"
                "  do    return the loss: the optimizer compares the losses of several evaluations"
            )
        evaluated(holding)
        norm = check_gradients(holding.parameters).norm
        assert norm is not None, "measured unless told otherwise"
        if max_norm is not None:
            _clip(holding.parameters, max_norm / (norm + 1e-6))
        norms.append(norm)
        if isinstance(loss, Tensor):
            losses.append(loss.detach())
        return loss

    optimizer.step(evaluate)
    bad = not all(bool(torch.isfinite(t).all()) for t in (*norms, *losses, *holding.parameters))
    if bad:
        optimizer.load_state_dict(state)
        with torch.no_grad():
            for p, old in zip(parameters_of(optimizer), before, strict=True):
                p.copy_(old)
    norm = norms[0] if norms else torch.zeros(())
    return norm, torch.tensor(float(bad), device=norm.device), losses


@torch.no_grad()
def _clip(parameters: list[Tensor], factor: Tensor) -> None:
    factor = factor.clamp(max=1.0)
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(factor.to(p.grad.device))
