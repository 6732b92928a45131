"""Modules that `torch.cuda.make_graphed_callables` has given another `forward`, which replays a CUDA graph; and threads
that are to replay none.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

_ABSENT = object()

_plain: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
"""Such a module, and the `forward` in its own dictionary before (`_ABSENT`: that of its class)."""

_without: set[int] = set()
"""Threads that are in such a context."""


def is_without_graphs() -> bool:
    """Whether this thread runs something again, which is to run as it would without graphs."""
    return bool(_without) and threading.get_ident() in _without


def forwards_of(callables: Any) -> list[tuple[nn.Module, Any]]:
    """Of what is about to be graphed, the modules and their own `forward`."""
    modules = callables if isinstance(callables, (tuple, list)) else (callables,)
    return [(m, vars(m).get("forward", _ABSENT)) for m in modules if isinstance(m, nn.Module)]


def note_graphed(plain: list[tuple[nn.Module, Any]]) -> None:
    """These have been graphed."""
    for module, forward in plain:
        if vars(module).get("forward", _ABSENT) is not forward:
            _plain.setdefault(module, forward)


@contextlib.contextmanager
def without_graphs_in_modules() -> Iterator[None]:
    """A context in which graphed modules run as they did before.

    The graph reads the script's own weights, whatever a replay of ours puts in their place, and it would overwrite
    results that the script still holds.
    """
    me = threading.get_ident()
    is_first = me not in _without
    _without.add(me)
    graphed = [(module, vars(module)["forward"]) for module in _plain if "forward" in vars(module)]
    for module, _ in graphed:
        plain = _plain[module]
        if plain is _ABSENT:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = plain
    try:
        yield
    finally:
        if is_first:
            _without.discard(me)
        for module, forward in graphed:
            module.__dict__["forward"] = forward
