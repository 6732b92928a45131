"""Plain state that a forward pass changes: a hidden state, a counter, a global, what an object or a dictionary holds.

Which names a call binds anew is found by comparing before and after, on the first call and now and then; from then on
only those are kept before each call. Keeping is holding a reference: nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.frames import is_user_code
from ampguard.capture.record import ABSENT, SavedAttribute
from ampguard.capture.root_calls.bymodule import ByModule

RESCAN_CALLS = 256
MAX_PLACES = 4096
MOST_TABLES = 64
MOST_ENTRIES = 256
"""Of a dictionary, or of an object's attributes; one with more is something else."""
OWN_ATTRIBUTES = frozenset(vars(nn.Module()))
OTHER_KINDS = (
    type,
    nn.Module,
    torch.optim.Optimizer,
    Tensor,
    ModuleType,
    FunctionType,
    MethodType,
    BuiltinFunctionType,
)
OTHER_PACKAGES = {
    "torch",
    "builtins",
    "numpy",
    "collections",
    "functools",
    "logging",
    "threading",
    "random",
    "argparse",
}
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
    """Attributes of the user's modules under `module`, globals that their methods name, and what hangs by a name in those."""
    places: list[tuple[dict[str, Any], str]] = []
    for inner in compat.all_modules(module):
        if not is_pytorchs(inner):
            attributes = inner.__dict__
            places += [(attributes, n) for n, v in attributes.items() if isinstance(v, VALUES) and n != "training"]
    places += [(scope, n) for scope, n in _globals_named(module) if isinstance(scope[n], VALUES)]
    for table, _ in tables_beside(module):
        places += [(table, n) for n, v in list(table.items()) if isinstance(v, VALUES)]
    return places


def tables_beside(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Dictionaries, and the attributes of plain objects, that hang in the user's modules under `module` or in globals that
    their methods name; and what each is called."""
    named: list[tuple[str, Any]] = []
    for path, inner in compat.named_modules_of_user(module).values():
        if not is_pytorchs(inner):
            prefix = f"{path}." if path else ""
            named += [(prefix + name, v) for name, v in inner.__dict__.items() if name not in OWN_ATTRIBUTES]
    named += [(name, scope[name]) for scope, name in _globals_named(module)]
    found: dict[int, tuple[dict[str, Any], str]] = {}
    for name, value in named:
        table = _table_of(value)
        if table is not None and 0 < len(table) <= MOST_ENTRIES and len(found) < MOST_TABLES:
            found.setdefault(id(table), (table, name))
    for table, name in list(found.values()):
        for key, value in list(table.items()):
            nested = _table_of(value)
            if nested is not None and 0 < len(nested) <= MOST_ENTRIES and len(found) < 2 * MOST_TABLES:
                found.setdefault(id(nested), (nested, f"{name}.{key}"))
    return list(found.values())


def is_pytorchs(module: nn.Module) -> bool:
    """Whether a module is one of PyTorch's own."""
    return type(module).__module__.startswith("torch.")


def _table_of(value: Any) -> dict[str, Any] | None:
    """A dictionary, or that of a plain object of the user's. No code of the object's own is run for that."""
    kind = type(value)
    if kind is dict:
        return value  # type: ignore[no-any-return]
    if issubclass(kind, OTHER_KINDS) or kind.__module__.partition(".")[0] in OTHER_PACKAGES:
        return None
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return attributes if type(attributes) is dict else None


def _globals_named(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """The globals that the methods of the user's modules name, and the functions of the user's that these call."""
    places: list[tuple[dict[str, Any], str]] = []
    seen: set[int] = set()
    kinds = {kind for inner in set(map(type, compat.all_modules(module))) for kind in inner.__mro__}
    functions = [function for kind in kinds for function in _methods_of(kind)]
    while functions:
        function = functions.pop()
        code = function.__code__
        if id(code) in seen or not is_user_code(code):
            continue
        seen.add(id(code))
        scope = function.__globals__
        names = [n for n in code.co_names if n in scope]
        places += [(scope, n) for n in names]
        functions += [scope[n] for n in names if type(scope[n]) is FunctionType]
    return places


def _methods_of(kind: type) -> list[FunctionType]:
    if kind.__module__.startswith("torch.") or kind is object:
        return []
    return [value for value in vars(kind).values() if type(value) is FunctionType]
