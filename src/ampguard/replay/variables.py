"""What the running script calls a module: where it hangs in another module, or the name of a variable.

The frames of the script are still on the stack while a step is investigated. Asked for incidents only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from ampguard import compat
from ampguard.capture.frames import frames_here, locals_of
from ampguard.capture.protocol.script_lines import is_script_code

MAX_FRAMES = 60
MAX_ITEMS = 64
MAX_ATTRIBUTES = 400


def script_names(modules: Iterable[nn.Module]) -> dict[int, str]:
    """`id(module)` to the script's name for it, as far as it has one: `encoder`, `nets['G']`.

    A module that hangs in another one that the script can name has its dotted path in there.
    """
    wanted = {id(module): module for module in modules}
    inside: dict[int, str] = {}
    direct: dict[int, str] = {}
    for name, value in _named_values():
        if not is_of(value, nn.Module):
            continue
        if id(value) in wanted:
            direct.setdefault(id(value), name)
        for path, part in compat.named_modules(value):
            if path and id(part) in wanted:
                inside.setdefault(id(part), path)
    return direct | inside


def expression_of(module: nn.Module) -> str | None:
    """How the script can write this module: `model.blocks[0].attn`, `trainer.net`, else `self.net`.

    By a variable where there is one, the outermost; None where none leads to it.
    """
    best, expression = (-1, -1), None
    for order, (name, value) in enumerate(_named_values(of_self="self.")):
        kind = 0 if name.partition(".")[0] == "self" else 2 if name.isidentifier() else 1
        if not is_of(value, nn.Module) or (kind, order) < best:
            continue
        path = next((path for path, part in compat.named_modules(value) if part is module), None)
        if path is not None and (path or name != "self"):  # a module's own method calls it so, nobody else
            best, expression = (kind, order), attribute_path(name, path)
    return expression


def attribute_path(base: str, name: str) -> str:
    """A dotted name as Python writes it.

    >>> attribute_path("self", "blocks.3.attn"), attribute_path("net", "")
    ('self.blocks[3].attn', 'net')
    """
    return base + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in name.split(".") if part)


def named_modules() -> Iterator[nn.Module]:
    """The modules that the running script can name, from the innermost frame on; some more than once."""
    return (value for _, value in _named_values() if is_of(value, nn.Module))


def is_of(value: Any, *kinds: type) -> bool:
    """`isinstance` that runs no code of the value's own: some warn, or import, when they are asked for their class."""
    return issubclass(type(value), kinds)


def _named_values(of_self: str = "") -> Iterator[tuple[str, Any]]:
    """Variables of the script's frames, from the innermost on, and what lies one step inside of them.

    `of_self` is put before the attributes of what a method calls `self`.
    """
    seen: set[int] = set()
    for frame in frames_here(sys._getframe(), MAX_FRAMES):
        if not is_script_code(frame.f_code):
            continue
        tables = [] if frame.f_locals is frame.f_globals else [locals_of(frame)]
        if id(frame.f_globals) not in seen:
            seen.add(id(frame.f_globals))
            tables.append(frame.f_globals)
        for names in tables:
            variables = [(n, v) for n, v in list(names.items()) if n.isidentifier() and not n.startswith("__")]
            yield from variables
            for name, value in variables:
                yield from _inside(name, value, of_self)


def _inside(name: str, value: Any, of_self: str) -> Iterator[tuple[str, Any]]:
    """Items of a list or a dict, attributes of an object."""
    if is_of(value, list, tuple):
        yield from ((f"{name}[{i}]", item) for i, item in enumerate(value[:MAX_ITEMS]))
    elif is_of(value, dict):
        yield from ((f"{name}[{key!r}]", item) for key, item in list(value.items())[:MAX_ITEMS])
    elif not is_of(value, type, nn.Module):
        try:
            attributes = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return
        if isinstance(attributes, dict) and len(attributes) <= MAX_ATTRIBUTES:
            prefix = of_self if name == "self" else f"{name}."
            yield from ((f"{prefix}{key}", item) for key, item in list(attributes.items()))
