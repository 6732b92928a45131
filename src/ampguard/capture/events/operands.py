"""What an event was given: the tensors that earlier events made, and those that are held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ampguard.capture.record import BackwardCall, Event, Held, Ref, RootCall
from ampguard.capture.root_calls.trees import PLAIN_TYPES

_FLAT_TYPES = frozenset({Ref, Held, *PLAIN_TYPES})


def leaves(tree: Any) -> list[Any]:
    """Everything in a tree of arguments that is no container."""
    found: list[Any] = []
    stack = [tree]
    while stack:
        item = stack.pop()
        if isinstance(item, tuple):
            stack.extend(tuple.__iter__(item))  # a class of the script's own may say something else of its length
        elif isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, (Ref, Held)):
            found.append(item)
        elif hasattr(item, "__dataclass_fields__") and not isinstance(item, type):
            stack.extend(getattr(item, name, None) for name in item.__dataclass_fields__)
        else:
            found.append(item)
    return found


def refs_in(tree: Any) -> list[Ref]:
    """Every reference to an earlier event in a tree of arguments."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Ref)]


def refs_of(event: Event) -> list[Ref]:
    """Every reference to an earlier event in what an event was given, swapped parameters included."""
    state = event.swapped_state if type(event) is RootCall else None
    if len(event.args) == 1 and type(event.args[0]) is Held and not (event.kwargs or state):
        return []
    operands = _flat_operands(event) if not state else None
    if operands is not None:
        return [operand for operand in operands if type(operand) is Ref]
    return refs_in((event.args, event.kwargs, state) if state else (event.args, event.kwargs))


def held_in(tree: Any) -> list[Held]:
    """Every held tensor in a tree of arguments."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Held)]


def held_by(event: Event) -> list[Held]:
    """Every held tensor in what an event was given."""
    operands = _flat_operands(event)
    if operands is not None:
        return [operand for operand in operands if type(operand) is Held]
    return held_in((event.args, event.kwargs))


def _flat_operands(event: Event) -> Sequence[Any] | None:
    """What an event was given where none of it is a container: the common case, at a fraction of the cost. Else None."""
    args = event.args
    if type(event) is BackwardCall:
        return args[0] if args[1] is None and args[2] is None else None
    if not _FLAT_TYPES.issuperset(map(type, args)):
        for value in args:  # a shape is a list of numbers
            if type(value) not in _FLAT_TYPES and (
                type(value) is not list or not PLAIN_TYPES.issuperset(map(type, value))
            ):
                return None
    kwargs = event.kwargs
    if not kwargs:
        return args
    return (*args, *kwargs.values()) if _FLAT_TYPES.issuperset(map(type, kwargs.values())) else None
