"""What a module holds, whatever its class has made of PyTorch's own methods.

A network may define `parameters()` anew (weights that its learner takes as a list, one group of them), or keep something of
its own under that name or under `modules`, `children` or `buffers`. What hangs in it is in its dictionaries all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """The module's own parameters by name: the dictionary itself, not a copy. Empty for a ScriptModule, whose is in C++."""
    return _own(module, "_parameters")


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """The module's own buffers by name: the dictionary itself. Empty for a ScriptModule."""
    return _own(module, "_buffers")


def children_of(module: nn.Module) -> dict[str, Any]:
    """The module's own children by name: the dictionary itself. Empty for a ScriptModule."""
    return _own(module, "_modules")


def is_built(module: nn.Module) -> bool:
    """Whether `nn.Module.__init__` has run. A class may call its methods, and other modules, before it does that."""
    return hasattr(module, "_modules")


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Those that hang in the module itself."""
    return [p for p in _members(module, "_parameters").values() if p is not None]


def own_children(module: nn.Module) -> dict[str, nn.Module]:
    """Those that hang in the module itself, by name."""
    return {name: child for name, child in _members(module, "_modules").items() if child is not None}


def all_parameters(module: nn.Module) -> list[nn.Parameter]:
    """What `nn.Module.parameters` yields, in the same order and much quicker: nothing is named on the way."""
    return _all(module, "_parameters")


def has_parameters(module: nn.Module) -> bool:
    """Whether the module, or any inside it, has a parameter."""
    return any(own_parameters(part) for _, part in named_modules(module))


def all_buffers(module: nn.Module) -> list[Tensor]:
    """What `nn.Module.buffers` yields."""
    return _all(module, "_buffers")


def all_tensors(module: nn.Module) -> list[Tensor]:
    """Its parameters and its buffers."""
    return [*all_parameters(module), *all_buffers(module)]


def all_modules(module: nn.Module) -> list[nn.Module]:
    """What `nn.Module.modules` yields: the module itself, and those inside it, each once."""
    return [part for _, part in named_modules(module)]


def named_modules(module: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """What `nn.Module.named_modules` yields; with duplicates, no module again inside itself."""
    seen: set[int] = set()
    stack: list[tuple[str, nn.Module, tuple[int, ...]]] = [("", module, ())]
    while stack:
        name, part, above = stack.pop()
        if id(part) in (seen if remove_duplicate else above):
            continue
        seen.add(id(part))
        yield name, part
        inside = own_children(part).items()
        stack += reversed([(f"{name}.{key}" if name else key, child, (*above, id(part))) for key, child in inside])


def named_parameters(module: nn.Module, remove_duplicate: bool = True) -> dict[str, nn.Parameter]:
    """What `nn.Module.named_parameters` yields, by name."""
    return _named(module, "_parameters", remove_duplicate)


def named_buffers(module: nn.Module) -> dict[str, Tensor]:
    """What `nn.Module.named_buffers` yields, by name."""
    return _named(module, "_buffers", remove_duplicate=True)


def _named(module: nn.Module, kind: str, remove_duplicate: bool) -> dict[str, Any]:
    method = getattr(type(module), f"named{kind}")
    if method is not getattr(nn.Module, f"named{kind}") and method.__module__.startswith("torch."):
        return dict(method(module))  # FSDP's own names
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for prefix, part in named_modules(module, remove_duplicate):
        for name, tensor in _members(part, kind).items():
            if tensor is not None and not (remove_duplicate and id(tensor) in seen):
                seen.add(id(tensor))
                found[f"{prefix}.{name}" if prefix else name] = tensor
    return found


def _all(module: nn.Module, kind: str) -> list[Any]:
    found: dict[int, Any] = {}
    seen: set[int] = set()  # a part may hang in several places, or know the module that it hangs in
    stack: list[Any] = [module]
    while stack:
        part = stack.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        for tensor in _members(part, kind).values():
            if tensor is not None:
                found[id(tensor)] = tensor
        children = _members(part, "_modules")
        if children:
            stack += [child for child in reversed(children.values()) if child is not None]
    return list(found.values())


def _members(module: nn.Module, kind: str) -> dict[str, Any]:
    found = module.__dict__.get(kind)
    return found if isinstance(found, dict) else dict(getattr(module, kind).items())  # a ScriptModule's are in C++


def _own(module: nn.Module, name: str) -> dict[str, Any]:
    found = module.__dict__.get(name)
    return found if isinstance(found, dict) else {}
