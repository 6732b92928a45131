"""Names that a module has given to what a probe replaces: they were bound before the guard was on, and would go around it.

Those in closures and in objects are not found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

from ampguard import compat

_WITHOUT_PYTORCH = sys.stdlib_module_names | {"sympy", "mpmath", "numpy", "scipy", "networkx", "jinja2"}
"""Packages of very many modules, most of them there in any training."""

_may_use_pytorch: dict[str, bool] = {}
"""By the names of modules: whether they are looked through."""

_looked_through: dict[Any, dict[str, tuple[int, int]]] = {}
"""By function, then by the names of modules that had no such name: which module that was, and how many names it had. The next
guard of a process is on sooner."""


def names_of(function: Any) -> list[tuple[ModuleType, str]]:
    """Of a function, in PyTorch's own front door (`torch.compile`) and elsewhere (`from torch import compile`)."""
    wanted = id(function)
    return _found(function, lambda values: wanted in map(id, values), lambda value: value is function)


def names_of_apply() -> list[tuple[ModuleType, str]]:
    """Of `torch.autograd.Function.apply`, bound to any class: `scale_gradient = ScaleGradient.apply`."""
    bound = compat.bound_type()
    apply = torch.autograd.Function.__dict__.get("apply")
    return _found(apply, lambda values: bound in map(type, values), compat.is_bound_apply)


def _found(
    function: Any, may_have: Callable[[Iterable[Any]], bool], is_one: Callable[[Any], bool]
) -> list[tuple[ModuleType, str]]:
    """`may_have` is quick: there are thousands of modules."""
    found = []
    known = _looked_through.setdefault(function, {})
    for key, module in _modules():
        names = module.__dict__
        state = id(module), len(names)
        if known.get(key) == state:
            continue
        here = [name for name, value in list(names.items()) if is_one(value)] if may_have(names.values()) else []
        found += [(module, name) for name in here]
        if not here:
            known[key] = state
    return found


def _modules() -> list[tuple[str, ModuleType]]:
    """All that are imported and may use PyTorch, but for its own parts, which have names of their own."""
    known = _may_use_pytorch
    for name in sys.modules.keys() - known.keys():
        known[name] = name.partition(".")[0] not in _WITHOUT_PYTORCH and not name.startswith("torch.")
    return [
        (name, module)
        for name, module in list(sys.modules.items())
        if known.get(name) and isinstance(module, ModuleType)
    ]
