"""Functions of a module, and methods of a class, that are replaced where they are called, and nowhere else.

Who takes one to keep it or to compare it (`reduce_fx = torch.mean`, `if reduce_fx is torch.mean`: Lightning's `self.log`)
goes on to have PyTorch's own: a replacement that outlives the time for which it was meant would be another function.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import CodeType, FrameType, MethodType, ModuleType
from typing import Any

from ampguard.capture.frames import is_user_code

Call = Callable[..., Any]
_LOADS_NAME = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_DEREF", "LOAD_CLASSDEREF"})
_BOTH_IN_ONE = sys.version_info >= (3, 12)
"""One operation loads attributes and methods; the lowest bit of its argument says which."""
_call_sites: dict[int, tuple[frozenset[int], CodeType]] = {}
"""By the identity of the code, as in `frames`."""


class CalledFunctions:
    """Replacements of modules' functions, from `put` until `undo`; what was made for one time is there for the next."""

    def __init__(self) -> None:
        self._made: dict[ModuleType, dict[str, _WhereCalled]] = {}
        self._classes: dict[ModuleType, type] = {}
        self._put: list[tuple[ModuleType, type, type]] = []

    def replace(self, module: ModuleType, name: str, make: Callable[[Call, str], Call]) -> None:
        """Have `make(original, name)` called by the user's code, and by libraries, in place of the original."""
        original = getattr(module, name)
        made = self._made.setdefault(module, {})
        if name not in made or made[name].original is not original:
            made[name] = _WhereCalled(name, original, make(original, name))
            self._classes.pop(module, None)

    def put(self) -> None:
        """Give the modules a class that looks at who asks; what they hold stays as it is."""
        for module, shown in self._made.items():
            before, after = type(module), self._classes.get(module)
            if after is None or after.__base__ is not before:
                after = type(before.__name__, (before,), {**shown, "__module__": before.__module__})
                self._classes[module] = after
            self._set_class(module, after)
            self._put.append((module, before, after))

    def undo(self) -> None:
        for module, before, after in reversed(self._put):
            if type(module) is after:
                self._set_class(module, before)
        self._put.clear()

    @staticmethod
    def _set_class(module: ModuleType, kind: type) -> None:
        module.__class__ = kind


class _WhereCalled:
    """Says which function an attribute is: the replacement for a call, what the module holds for everybody else."""

    def __init__(self, name: str, original: Call, replacement: Call) -> None:
        self._name = name
        self.original = original
        self._replacement = replacement

    def __get__(self, module: ModuleType | None, kind: type) -> Any:
        held = vars(module).get(self._name, self.original)
        return self._replacement if held is self.original and _is_called(sys._getframe(1)) else held

    def __set__(self, module: ModuleType, value: Any) -> None:
        vars(module)[self._name] = value

    def __delete__(self, module: ModuleType) -> None:
        del vars(module)[self._name]


class CalledMethod:
    """A method of a class, replaced for its objects; who asks the class for it, and does not call it, gets the original."""

    def __init__(self, original: Any, replacement: Call) -> None:
        self._original = original
        self._replacement = replacement

    def __get__(self, subject: object | None, kind: type) -> Any:
        if subject is not None:
            return MethodType(self._replacement, subject)
        return self._replacement if _is_called(sys._getframe(1)) else self._original


def _is_called(frame: FrameType) -> bool:
    """Whether the frame's code, which is not PyTorch's, has asked for an attribute to call it at once."""
    code = frame.f_code
    if not is_user_code(code):
        return False
    known = _call_sites.get(id(code))
    if known is None:
        known = _call_sites[id(code)] = (call_sites(code), code)
    return frame.f_lasti in known[0]


def call_sites(code: CodeType) -> frozenset[int]:
    """Where the code loads an attribute that it then calls (`torch.mean` in `torch.mean(x)`)."""
    found: set[int] = set()
    steps = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "EXTENDED_ARG")]
    for at, step in enumerate(steps):
        if step.opname == "LOAD_METHOD" or (step.opname == "LOAD_ATTR" and _has_null(steps, at)):
            found.add(step.offset)
    return frozenset(found)


def _has_null(steps: list[dis.Instruction], at: int) -> bool:
    """Whether the place that a call needs beside the function is made for this attribute: with it, before it or after it."""
    if _BOTH_IN_ONE and (steps[at].arg or 0) & 1:
        return True
    if sys.version_info >= (3, 13):
        return at + 1 < len(steps) and steps[at + 1].opname == "PUSH_NULL"
    if sys.version_info < (3, 11):  # no such place: a call by keyword finds the function below its arguments
        return _is_callee(steps[at + 1 :])
    if not at or steps[at - 1].opname not in _LOADS_NAME:
        return False
    in_name = steps[at - 1].opname == "LOAD_GLOBAL" and bool((steps[at - 1].arg or 0) & 1)
    return in_name or (at > 1 and steps[at - 2].opname == "PUSH_NULL")


def _is_callee(steps: list[dis.Instruction]) -> bool:
    """Whether what lies on top of the stack is called by what comes next."""
    depth = 1
    for step in steps:
        count = step.arg or 0
        above = {"CALL_FUNCTION": count, "CALL_FUNCTION_KW": count + 1, "CALL_FUNCTION_EX": 1 + (count & 1)}.get(
            step.opname
        )
        if above is not None and depth - above == 1:
            return True
        if depth == 1 and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            return False
        depth += dis.stack_effect(step.opcode, step.arg, jump=False)
        if depth < 1:
            return False
    return False
