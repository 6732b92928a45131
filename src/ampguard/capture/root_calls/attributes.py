"""Plain state that a forward pass changes: a hidden state, a counter, a global.

Which names a call binds anew is found by comparing before and after, on the first call and now and then; from then on
only those are kept before each call. Keeping is holding a reference: nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ampguard.capture.frames import is_user_code
from ampguard.capture.record import ABSENT, SavedAttribute
from ampguard.capture.root_calls.bymodule import ByModule

RESCAN_CALLS = 256
MAX_PLACES = 4096
VALUES = (int, float, bool, str, tuple, Tensor, type(None))


@dataclass(slots=True)
class _Watched:
    changing: dict[tuple[int, str], tuple[dict[str, Any], str]] = field(default_factory=dict)
    calls: int = 0
    scanned: set[tuple[int, str]] | None = None
    """On a scanning call: the names that were there before it."""


class AttributeWatch:
    """Remembers, per root module, which attributes and globals its calls bind anew."""

    def __init__(self) -> None:
        self._watched: ByModule[_Watched] = ByModule()

    def before_call(self, module: nn.Module, again: bool = False) -> list[SavedAttribute]:
        """What the names that calls change stand for now; on a scanning call (or `again`), all names."""
        watched = self._watched.get(module)
        if watched is None:
            watched = self._watched.put(module, _Watched())
        scan = again or watched.calls % RESCAN_CALLS == 0
        watched.calls += 1
        if not scan:
            return [SavedAttribute(owner, name, owner.get(name, ABSENT)) for owner, name in watched.changing.values()]
        places = plain_state(module)
        watched.scanned = {(id(owner), name) for owner, name in places}
        return [SavedAttribute(owner, name, owner[name]) for owner, name in places]

    def after_call(self, module: nn.Module, saved: list[SavedAttribute]) -> list[SavedAttribute]:
        """Those of the saved names that the call bound anew, or made (of a scan, for the next calls too)."""
        watched = self._watched.get(module)
        if watched is None:
            return []
        changed = [s for s in saved if s.owner.get(s.name, ABSENT) is not s.value]
        if watched.scanned is not None:
            there, watched.scanned = watched.scanned, None
            made = (place for place in plain_state(module) if (id(place[0]), place[1]) not in there)
            changed += [SavedAttribute(owner, name, ABSENT) for owner, name in made]
        for s in changed:
            watched.changing.setdefault((id(s.owner), s.name), (s.owner, s.name))
        return changed


def plain_state(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Attributes of the user's modules under `module`, and globals that their forward methods name."""
    places: list[tuple[dict[str, Any], str]] = []
    seen: set[int] = set()
    for inner in module.modules():
        kind = type(inner)
        if kind.__module__.startswith("torch."):
            continue
        attributes = inner.__dict__
        places += [(attributes, n) for n, v in attributes.items() if isinstance(v, VALUES) and n != "training"]
        forward = getattr(kind, "forward", None)
        code = getattr(forward, "__code__", None)
        if code is not None and id(code) not in seen and is_user_code(code):
            seen.add(id(code))
            scope = forward.__globals__  # type: ignore[union-attr]
            places += [(scope, n) for n in code.co_names if n in scope and isinstance(scope[n], VALUES)]
        if len(places) > MAX_PLACES:
            return []
    return places
