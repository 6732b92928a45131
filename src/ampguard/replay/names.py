"""Modules by the names that the user's code gives them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ampguard import compat
from ampguard.capture.record import Event, RootCall


def module_names(root: nn.Module, prefix: str = "") -> dict[int, str]:
    """`id(module)` to dotted name for every module under `root`; no wrapper's prefix (`module.`, `_orig_mod.`).

    The root itself is `prefix` ("" where it hangs in no other module). A module that hangs in two places has its
    first name.
    """
    names: dict[int, str] = {}
    _walk(root, strip_wrappers(root, prefix), names)
    return names


def _walk(module: nn.Module, name: str, names: dict[int, str]) -> None:
    if id(module) in names:
        return
    names[id(module)] = name
    hidden = compat.is_wrapper(module)
    for key, child in module._modules.items():
        if child is None:
            continue
        if key == hidden:
            _walk(child, name, names)
        else:
            _walk(child, f"{name}.{key}" if name else key, names)


def strip_wrappers(root: nn.Module, prefix: str) -> str:
    """A prefix found by attribute lookup can itself run through wrappers."""
    return ".".join(part for part in prefix.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module"))


def parameter_names(events: Iterable[Event], modules: dict[int, str]) -> dict[int, str]:
    """`id(parameter)` to its dotted name, for the root modules of some events; `modules` are theirs."""
    names: dict[int, str] = {}
    for event in events:
        if not isinstance(event, RootCall):
            continue
        for owner in event.module.modules():
            prefix = modules.get(id(owner))
            for name, parameter in owner.named_parameters(recurse=False) if prefix is not None else ():
                names.setdefault(id(parameter), f"{prefix}.{name}" if prefix else name)
    return names
