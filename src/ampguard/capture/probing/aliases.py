"""Names that a module has given to what a probe replaces: they were bound before the guard was on, and would go around it.

Those in closures and in objects are not found.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import MethodType, ModuleType
from typing import Any

_WITHOUT_PYTORCH = sys.stdlib_module_names | {"sympy", "mpmath", "numpy", "scipy", "networkx", "jinja2"}
"""Packages of very many modules, most of them there in any training."""


def names_of(function: Any) -> list[tuple[ModuleType, str]]:
    """Of a function, in PyTorch's own front door (`torch.compile`) and elsewhere (`from torch import compile`)."""
    found = []
    for module in _modules():
        names = vars(module)
        if id(function) in map(id, names.values()):  # looked at quickly: there are thousands of modules
            found += [(module, name) for name, value in list(names.items()) if value is function]
    return found


def methods_of(function: Any) -> list[tuple[ModuleType, str]]:
    """Of a class method, bound to any class: `scale_gradient = ScaleGradient.apply`."""
    found = []
    for module in _modules():
        names = vars(module)
        if MethodType in map(type, names.values()):
            methods = [(name, value) for name, value in list(names.items()) if type(value) is MethodType]
            found += [(module, name) for name, method in methods if method.__func__ is function]
    return found


def _modules() -> Iterator[ModuleType]:
    """All that are imported and may use PyTorch, but for its own parts, which have names of their own."""
    for name, module in list(sys.modules.items()):
        package, dot, _ = name.partition(".")
        if package not in _WITHOUT_PYTORCH and not (dot and package == "torch") and isinstance(module, ModuleType):
            yield module
