"""The tensors of an event's arguments under readable names."""

from __future__ import annotations

import inspect
from typing import Any

from ampguard import compat
from ampguard.capture.record import Event, GlueOp, RootCall
from ampguard.capture.root_calls.given_objects import GivenObject


def named_leaves(event: Event) -> list[tuple[str, Any]]:
    """The tensors of an event's arguments under readable names (`x`, `batch['image']`, `args[1]`)."""
    found: list[tuple[str, Any]] = []

    def walk(name: str, tree: Any) -> None:
        if isinstance(tree, dict):
            for key, value in tree.items():
                walk(f"{name}[{key!r}]", value)
        elif isinstance(tree, (list, tuple)):
            for position, value in enumerate(tree):
                walk(f"{name}[{position}]", value)
        elif isinstance(tree, GivenObject):
            found.extend(
                (name + inside, value) for (_, _, inside), value in zip(tree.places.found, tree.values, strict=True)
            )
        else:
            found.append((name, tree))

    names: list[str] = []
    if isinstance(event, RootCall):
        try:
            parameters = inspect.signature(compat.unwrapped(event.module).forward).parameters.values()
            names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        except (TypeError, ValueError):
            names = []
    elif isinstance(event, GlueOp):
        names = [a.name for a in compat.schema_of(event.func).arguments]
    for position, value in enumerate(event.args):
        walk(names[position] if position < len(names) else f"args[{position}]", value)
    for key, value in event.kwargs.items():
        walk(key, value)
    return found
