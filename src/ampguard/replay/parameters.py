"""Parameters by the names that the user's code gives them."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import TypeGuard

from torch import Tensor, nn

from ampguard.replay.names import module_names


def parameter_name(parameter: Tensor, roots: Iterable[tuple[nn.Module, str]]) -> str | None:
    """The dotted name of `parameter` under one of the root modules (each with its prefix).

    Where none of them holds it, the modules of this process are asked (slow: for incidents only); None where no module
    holds it at all.
    """
    owners = [module for module in gc.get_objects() if is_owner(module, parameter)]
    for root, prefix in roots:
        names = module_names(root, prefix)
        for owner in owners:
            if id(owner) in names:
                return _joined(names[id(owner)], key_of(owner, parameter))
    return key_of(owners[0], parameter) if owners else None


def is_owner(thing: object, parameter: Tensor) -> TypeGuard[nn.Module]:
    """Whether `thing` is a module that holds the parameter itself."""
    if not issubclass(type(thing), nn.Module):  # `isinstance` would ask lazy proxies, which may import things
        return False
    own = thing.__dict__.get("_parameters")
    return isinstance(own, dict) and any(p is parameter for p in own.values())


def key_of(owner: nn.Module, parameter: Tensor) -> str:
    return next(name for name, p in owner._parameters.items() if p is parameter)


def _joined(module: str, key: str) -> str:
    return f"{module}.{key}" if module else key
