"""Running a compiled training step once more: left where it differentiates, and without its updates.

A step writes: it clears gradients, updates weights, moves a scaler and a scheduler on. Run again for a replay it does
none of that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.frames import is_user_code, locals_of
from ampguard.numerics import is_finite


class LeftError(BaseException):
    """A replay leaves a training step here; `losses` is what was about to be differentiated."""

    def __init__(self, losses: Sequence[Tensor]) -> None:
        super().__init__()
        self.losses = losses


@contextlib.contextmanager
def left_at(turn: int) -> Iterator[None]:
    """What is differentiated for the `turn`-th time raises `LeftError`; what was before leaves no gradients."""
    turns = 0
    before_scaling: dict[int, tuple[Tensor, Tensor]] = {}
    multiply, differentiate = compat.GRAD_SCALER.scale, torch.autograd.grad

    def leave(tensors: Any) -> None:
        nonlocal turns
        turns += 1
        if turns == turn:
            raise LeftError(with_unscaled(tensors, before_scaling.get))

    def scale(scaler: Any, loss: Any) -> Any:
        scaled = multiply(scaler, loss)
        if isinstance(scaled, Tensor) and scaled is not loss:
            before_scaling[id(scaled)] = (scaled, loss)
        return scaled

    def grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not stays_in_graph(args, kwargs):
            leave(outputs)
        return differentiate(outputs, *args, **kwargs)

    calls = [
        (torch.autograd, "backward", lambda tensors, *args, **kwargs: leave(tensors)),
        (torch.autograd, "grad", grad),
    ]
    with replaced([*calls, (compat.GRAD_SCALER, "scale", scale)]):
        yield


@contextlib.contextmanager
def nothing_updated() -> Iterator[None]:
    """Optimizers, scalers and schedulers stay as they are: an earlier turn's update has been made."""
    kinds = [(kind, "step") for kind in subclasses_of(Optimizer) if "step" in vars(kind)]
    kinds += [(compat.GRAD_SCALER, name) for name in ("step", "update", "unscale_")]
    kinds += [(kind, "step") for kind in subclasses_of(torch.optim.lr_scheduler.LRScheduler) if "step" in vars(kind)]
    with replaced([(kind, name, lambda *args, **kwargs: None) for kind, name in kinds]):
        yield


@contextlib.contextmanager
def gradients_kept(parameters: Iterable[Tensor]) -> Iterator[None]:
    """What is done to these gradients is done to copies."""
    kept = [(p, p.grad) for p in {id(p): p for p in parameters}.values() if p.is_leaf]
    try:
        for parameter, gradient in kept:
            if gradient is not None:
                parameter.grad = gradient.detach().clone()
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


@contextlib.contextmanager
def replaced(attributes: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Attributes that stand for something else for as long."""
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in attributes]
    try:
        for owner, name, value in attributes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


def subclasses_of(kind: type[Any]) -> list[type[Any]]:
    """A class and all that are derived from it."""
    derived: list[type[Any]] = kind.__subclasses__()
    return [kind, *(inner for one in derived for inner in subclasses_of(one))]


def with_unscaled(tensors: Any, scaled_from: Callable[[int], tuple[Any, Tensor] | None]) -> list[Tensor]:
    """What is differentiated; and behind that, of each tensor that a scaler has multiplied, what it was before."""
    losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    return losses + [known[1] for loss in losses if (known := scaled_from(id(loss))) is not None]


def bad_number_in(error: BaseException) -> Tensor | None:
    """The last number that wants a gradient and is not finite, among the variables of the frames that an error left."""
    found: Tensor | None = None
    entry = error.__traceback__
    while entry is not None:
        values = locals_of(entry.tb_frame).values() if is_user_code(entry.tb_frame.f_code) else ()
        for value in values:
            if isinstance(value, Tensor) and value.requires_grad and value.numel() == 1 and not is_finite(value):
                found = value
        entry = entry.tb_next
    return found


def stays_in_graph(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `torch.autograd.grad`, given these after its outputs, makes gradients that are differentiated again."""
    return bool(args[3] if len(args) > 3 else kwargs.get("create_graph", False))
