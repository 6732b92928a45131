"""Names as the user's code has them: of an optimizer, a scaler, a parameter."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterable, Set
from types import CodeType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.frames import frames_up, is_user_code, locals_of
from ampguard.capture.protocol.script_lines import is_script_code
from ampguard.capture.protocol.script_objects import MAX_FRAMES, attributes_of, modules_in_frames
from ampguard.replay.names import module_names, module_of_parameter, parameters_under

MAX_LOOKS = 4000
PLAIN = (list, tuple, dict)
MOST_NESTED = 3
"""Lists and dictionaries that lie in one another and are looked through."""


def variable_name(subject: object) -> str | None:
    """What the script calls `subject`: a name in its frames, an attribute of `self`, an item of a list."""
    frames = list(frames_up(sys._getframe(1), MAX_FRAMES))
    private: str | None = None
    looped = frozenset().union(*(loop_targets(f.f_code) for f in frames if is_script_code(f.f_code)))
    for wanted in (is_script_code, is_user_code):
        for frame in frames:
            if not wanted(frame.f_code):
                continue
            for names in (locals_of(frame), frame.f_globals):
                found = _name_among(names, subject, looped)
                if found is not None and "._" not in found:
                    return found
                private = private or found
    return private


def only_optimizer() -> str | None:
    """What the script calls its optimizer, where its frames hold one alone."""
    frames = [frame for frame in frames_up(sys._getframe(1), MAX_FRAMES) if is_script_code(frame.f_code)]
    held = (
        value for frame in frames for names in (locals_of(frame), frame.f_globals) for value in list(names.values())
    )
    found = {id(value): value for value in held if isinstance(value, Optimizer)}
    return variable_name(next(iter(found.values()))) if len(found) == 1 else None


def tensor_called(parameter: Tensor, kind: str = "tensor") -> str:
    """What the script calls a weight that hangs in no module (`weights['w1']`); else its shape says which it is."""
    return variable_name(parameter) or f"a {kind} of shape {tuple(parameter.shape)}"


@functools.lru_cache(maxsize=256)
def loop_targets(code: CodeType) -> frozenset[str]:
    """The names that `for` loops of this code give their values.

    >>> sorted(loop_targets(compile("for o in a:\n  pass\nfor k, v in b: x = k", "", "exec")))
    ['k', 'o', 'v']
    """
    found: set[str] = set()
    left = 0
    for instruction in dis.get_instructions(code):
        if instruction.opname == "FOR_ITER":
            left = 1
        elif left and instruction.opname.startswith("UNPACK_"):
            left += (instruction.arg or 1) - 1
        elif left and instruction.opname.startswith("STORE_"):
            names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
            found |= {str(name) for name in names}
            left -= len(names)
        else:
            left = 0
    return frozenset(found)


def repeated_in(subject: object) -> list[str]:
    """All places of a container of the script that holds `subject` more than once: a list, a dictionary, one of `self`."""
    for frame in frames_up(sys._getframe(1), MAX_FRAMES):
        if not is_script_code(frame.f_code):
            continue
        for path, container in _containers(locals_of(frame)):
            held = [where for where, item in _items(path, container) if _is_it(item, subject)]
            if len(held) > 1:
                return held
    return []


def _containers(names: dict[str, Any]) -> list[tuple[str, Any]]:
    """Lists and dictionaries among the names of a frame, and among the attributes of its `self`."""
    own = attributes_of(names.get("self"))
    attributes = {f"self.{key}": item for key, item in list(own.items())[:400]} if isinstance(own, dict) else {}
    several = [*list(names.items()), *attributes.items()]
    return [(path, v) for path, v in several if isinstance(v, (list, tuple, dict)) and 2 <= len(v) <= 64]


def _items(path: str, container: Any) -> list[tuple[str, Any]]:
    pairs = container.items() if isinstance(container, dict) else enumerate(container)
    return [(f"{path}[{_key(key)}]", item) for key, item in list(pairs)]


def _key(key: object) -> str:
    """As the source has it; a tensor that is a key (an optimizer for each parameter) has no short name."""
    return "..." if isinstance(key, Tensor) else repr(key)


def _item_of_dict(names: dict[str, Any], subject: object) -> str | None:
    """`opts['G']` where the plain name is that of a loop over the values of a dictionary."""
    found = (each for path, v in _containers(names) if not path.startswith("__") for each in _items(path, v))
    return next((path for path, item in found if _is_it(item, subject)), None)


def _name_among(names: dict[str, Any], subject: object, loop_names: frozenset[str] = frozenset()) -> str | None:
    for name, value in list(names.items()):
        if name not in ("self", "cls") and _is_it(value, subject):
            several = _item_of_several(names, subject)
            return several or (_item_of_dict(names, subject) if name in loop_names else None) or name
    for name, value in list(names.items()):
        if name.startswith("__"):
            continue
        inner = _name_inside(name, value, subject)
        if inner is not None:
            return inner
    return None


def _item_of_several(names: dict[str, Any], subject: object) -> str | None:
    """`opts[1]` where the plain name is that of a loop over `opts`: there it stands for each of them."""
    several = [(n, v) for n, v in list(names.items()) if isinstance(v, (list, tuple)) and 2 <= len(v) <= 64]
    found = ((f"{name}[{i}]", item) for name, items in several for i, item in enumerate(items))
    return next((path for path, item in found if _is_it(item, subject)), None)


def _name_inside(name: str, value: Any, subject: object) -> str | None:
    if isinstance(value, (list, tuple, dict)):
        return _name_in_container(name, value, subject)
    attributes = attributes_of(value)
    if not isinstance(attributes, dict) or isinstance(value, type) or len(attributes) > 400:
        return None
    direct = [f"{name}.{key}" for key, item in list(attributes.items()) if _is_it(item, subject)]
    if direct:  # before `self.optimizers_dict['opt_class']`
        return next((path for path in direct if "._" not in path), direct[0])
    for key, item in list(attributes.items()) if name == "self" else ():
        if isinstance(item, (list, tuple, dict)) and len(item) <= 16:
            inner = _name_in_container(f"{name}.{key}", item, subject)
            if inner is not None:
                return inner
    shared = vars(type(value))
    return next((f"{name}.{key}" for key, item in list(shared.items()) if item is subject), None)


def _name_in_container(name: str, value: Any, subject: object, depth: int = 0) -> str | None:
    """An item of a list or a dictionary, also of one that lies in it (`params['blocks'][0]['qkv']`), or what an object in it
    calls the subject (`tasks[0].optimizer`)."""
    if len(value) > 64:
        return None
    if isinstance(value, dict):
        is_given = name == "kwargs"  # what a callback was called with: the keyword is the name
        items = [(key if is_given else f"{name}[{_key(key)}]", item) for key, item in list(value.items())]
    else:
        items = [(f"{name}[{i}]", item) for i, item in enumerate(value)]
    found = next((path for path, item in items if _is_it(item, subject)), None)
    if found is not None or len(items) > 16:
        return found
    for path, item in items:
        if isinstance(item, (list, tuple, dict)):
            is_plain = type(item) in PLAIN and type(value) in PLAIN  # a named tuple has names of its own
            inside = _name_in_container(path, item, subject, depth + 1) if is_plain and depth < MOST_NESTED else None
            if inside is not None:
                return inside
            continue
        attributes = attributes_of(item)
        if isinstance(attributes, dict) and not isinstance(item, (type, nn.Module)) and len(attributes) <= 400:
            key = next((key for key, inner in list(attributes.items()) if _is_it(inner, subject)), None)
            if key is not None and not (key.startswith("_") or key == "__dict__"):
                return f"{path}.{key}"
    return None


def _is_it(value: Any, subject: object) -> bool:
    """Whether `value` is the thing itself, or a framework's wrapper around it."""
    if value is subject:
        return True
    attributes = attributes_of(value)
    if not isinstance(attributes, dict):
        return False
    is_held = any(attributes.get(name) is subject for name in ("optimizer", "_optimizer"))
    return (
        is_held and callable(getattr(value, "step", None)) and hasattr(value, "param_groups")
    )  # (no trainer, no schedule)


def parameter_names(roots: Iterable[tuple[nn.Module, str]], wanted: list[Tensor]) -> dict[int, str]:
    """`id(parameter)` to dotted name, in the called modules first, then in those that the script's frames name."""
    names: dict[int, str] = {}
    containers = modules_in_frames(sys._getframe(1))
    for root, prefix in roots:
        outer = root if prefix else _outermost(root, containers)
        _add_names(outer, prefix if outer is root else "", names)
    if any(id(p) not in names for p in wanted):
        for module in containers:
            _add_names(module, "", names)
    return names


def _outermost(root: nn.Module, containers: list[nn.Module]) -> nn.Module:
    """The module of the script in which `root` hangs, where only a part of it was called."""
    return next((c for c in containers if c is not root and any(m is root for m in compat.all_modules(c))), root)


def _add_names(root: nn.Module, prefix: str, names: dict[int, str]) -> None:
    root = compat.unwrapped(root)
    for parameter, name in parameters_under(root, module_names(root, prefix)).items():
        names.setdefault(parameter, name)


def common_module(names: list[str]) -> str | None:
    """The innermost module that owns all these parameters; None where that is the root."""
    if not names:
        return None
    parts = [module_of_parameter(name).split(".") for name in names]
    shared: list[str] = []
    for position in zip(*parts, strict=False):
        if len(set(position)) > 1:
            break
        shared.append(position[0])
    return ".".join(shared) or None


def whole_modules(names: list[str], everything: Set[str]) -> list[str]:
    """The largest modules whose parameters are all among `names`, and the names of what else there is.

    >>> whole_modules(["a.x.weight", "a.x.bias", "a.y.bias"], {"a.x.weight", "a.x.bias", "a.y.bias", "a.y.weight"})
    ['a.x', 'a.y.bias']
    """
    others = set(everything) - set(names)
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        owners = (".".join(parts[:end]) for end in range(1, len(parts)))
        whole = (owner for owner in owners if not any(other.startswith(f"{owner}.") for other in others))
        found[next(whole, name) if name in everything else name] = None
    return list(found)
