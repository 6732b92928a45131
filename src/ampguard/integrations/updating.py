"""One optimizer between two of its steps: what its gradients are, and what is refused then."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampguard import compat
from ampguard.engine import misuse
from ampguard.engine.closures import needs_closure
from ampguard.engine.holding import Holding
from ampguard.engine.setup import parameters_of
from ampguard.engine.step import GradientCheck, check_gradients
from ampguard.errors import ProtocolError, SetupError
from ampguard.integrations.users_line import users_line


@dataclass
class Updating:
    """One optimizer between two of its steps."""

    holding: Holding
    check: GradientCheck | None = None
    """What was found when its gradients were divided; None while they carry the scale."""
    divided_at: misuse.Line | None = None
    stepped_at: misuse.Line | None = None
    rest: list[tuple[weakref.ref[Tensor], int]] = field(default_factory=list)
    """Its gradients as its last step left them."""
    names: dict[int, str] = field(default_factory=dict)
    is_watched: bool = False
    """Whether the optimizer's own step is looked at."""
    scaled: list[tuple[weakref.ref[Tensor], int]] = field(default_factory=list)
    """Its gradients as our own backward pass has left them, with the loss scale; none since they were used."""


def held(optimizer: Optimizer, model: nn.Module | None, leaf_of: Callable[[Tensor], Tensor]) -> Holding:
    """With the flat buffers among its parameters, where the model is known. `leaf_of`: the weight of a master."""
    models_parameters: list[Tensor] = [*compat.all_parameters(model)] if model is not None else []
    own = {id(p) for p in models_parameters}
    memory = {compat.storage_key(p) for p in models_parameters} - {0}
    flat = [p for p in parameters_of(optimizer) if id(p) not in own and compat.storage_key(p) in memory]
    return Holding(type(optimizer).__name__, optimizer, flat, models_parameters, leaf_of)


@torch.no_grad()
def divide(parameters: Iterable[Tensor], check: GradientCheck) -> None:
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(check.inverse_scale.to(p.grad.device))


def checked_again(own: Updating) -> GradientCheck:
    """Gradients that were divided, and perhaps clipped since: what was not finite then stays so (a clamp hides Inf)."""
    assert own.check is not None
    found_inf = torch.maximum(own.check.found_inf, check_gradients(own.holding.parameters, wants_norm=False).found_inf)
    return GradientCheck(own.check.norm, found_inf, torch.ones_like(own.check.inverse_scale))


def no_gradients(holding: Holding) -> ProtocolError:
    return misuse.error(
        "no-gradients",
        f"a step of `{holding.name}`, but none of its {len(holding.parameters)} parameters has a gradient",
        "check that the loss depends on them (frozen? detached? toggled off? moved or copied after the optimizer was "
        "made?), and that nothing clears gradients between the backward pass and the step",
        again=users_line(),
    )


def divided_twice(own: Updating) -> ProtocolError:
    return misuse.error(
        "double-unscale",
        f"the gradients of `{own.holding.name}` were unscaled twice in one step",
        "unscale once, after the last backward pass of the step: not after every micro-batch",
        own.divided_at,
        misuse.calling_line(),
    )


def stepped_twice(own: Updating) -> ProtocolError:
    return misuse.error(
        "missing-update",
        f"`{own.holding.name}` was stepped twice without an update() of the loss scale between",
        "call scaler.update() at the end of every iteration",
        own.stepped_at,
        misuse.calling_line(),
    )


def direct_step(name: str, scale: float, do: str) -> ProtocolError:
    return misuse.error(
        "bypassed-scaler",
        f"optimizer.step() of `{name}` with gradients that are {scale:g} times too large: they carry the loss scale",
        do,
        again=users_line(),
    )


def refuse_closures(optimizer: Optimizer, who: str) -> None:
    """Raise SetupError for an optimizer that asks for a loss as often as it likes (LBFGS)."""
    if needs_closure(optimizer):
        raise SetupError(
            f"`{type(optimizer).__name__}` computes the loss several times within one step, and {who} is given one loss a step\n"
            "  do    use another optimizer; or ampguard.Amp(model, optimizer, precision='bf16') (or 'fp32'), whose "
            "amp.step(optimizer, closure) takes it"
        )
