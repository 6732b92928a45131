"""Hooks that refuse to run twice for one step: two backward passes without a step are a mistake (Opacus' check)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ampguard import compat
from ampguard.capture.record import BadResult, Event, RootCall


@contextlib.contextmanager
def forgiving_hooks(events: Iterable[Event]) -> Iterator[None]:
    """A hook of a called module that raises is passed over, as if it had returned nothing."""
    roots = {id(event.module): event.module for event in events if isinstance(event, RootCall)}
    changed: dict[int, tuple[dict[Any, Any], dict[Any, Any]]] = {}
    for root in roots.values():
        for module in compat.all_modules(root):
            for hooks in compat.hook_dictionaries(module):
                if hooks and id(hooks) not in changed:
                    changed[id(hooks)] = hooks, dict(hooks)
                    for key, hook in list(hooks.items()):
                        hooks[key] = functools.partial(_forgiven, hook)
    try:
        yield
    finally:
        for hooks, before in changed.values():
            hooks.update(before)


def calls_hooks(bad: BadResult) -> bool:
    """Whether modules that a step called have hooks."""
    roots = {id(event.module): event.module for event in bad.record.events if isinstance(event, RootCall)}
    return any(any(compat.hook_dictionaries(module)) for root in roots.values() for module in compat.all_modules(root))


def _forgiven(hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return hook(*args, **kwargs)
    except Exception:
        return None
