"""Optimizers that are made after O2 has cast the weights: they hold these, whose gradients go to their master weights."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampguard import compat
from ampguard.engine.setup import parameters_of
from ampguard.errors import SetupError

_cast = compat.by_tensor()
"""The weights of all models that O2 has cast."""

_found_right: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""How many parameters an optimizer had when none of them was such a weight."""


def note_cast(weights: Iterable[Tensor]) -> None:
    """From the first call on, each optimizer of the process is looked at as it steps for the first time.

    The engine looks at those that it steps by itself.
    """
    _look_at_steps()
    for weight in weights:
        _cast[weight] = True


@functools.cache
def _look_at_steps() -> None:
    register, _ = compat.optimizer_step_hooks()
    register(compat.only_for_others(_as_it_steps))


def _as_it_steps(optimizer: Optimizer, *_: object) -> None:
    """Not inside a step that is being compiled: what is kept here by weak references is nothing to be traced."""
    if not torch.compiler.is_compiling():
        refuse_late(optimizer)


def refuse_late(optimizer: Optimizer) -> None:
    """Raise SetupError where it holds weights that O2 has cast, in place of their masters."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _found_right.get(optimizer) == count:
        return
    held = [p for p in parameters_of(optimizer) if p in _cast]
    if held:
        raise SetupError(
            f"{len(held)} of the {count} parameters of `{type(optimizer).__name__}` are weights of a model that O2 has cast to "
            "float16: what it updates is their float32 master weights, in the optimizers that it was given\n"
            "  do    make every optimizer from the float32 model, and give O2 all of them: prepare(model, [first, second]), or "
            "Amp(model, [first, second], precision='O2'). For another phase of training set the learning rate of the one "
            "that there is"
        )
    _found_right[optimizer] = count
