"""Frames of ours that warnings see through.

A warning names the line of whoever called what warns: `warnings.warn(message, stacklevel=2)`. Where we stand between
the two, that would be a line of ours: Python would name a file that the user has never seen, and show the warning once a
process instead of once a line. Python passes over the frames of its own import system when it counts levels, and so does
`logging`; they know them by two words in their file's name. So our functions are given a file name that has both:
`capture/glue/tape.py` becomes `capture/importlib_bootstrap/../tape.py`. A call costs what it did before.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from ampguard import compat

PACKAGE = __name__.partition(".")[0]
PLACES = tuple(f"{PACKAGE}.{place}" for place in ("capture.", "compat.", "replay.", "run.dynamics", "run.overrides."))
"""Where functions lie that may stand between a script and PyTorch."""

DETOUR = "importlib_bootstrap"
_WRAPPINGS = ("__func__", "fget", "func", "__wrapped__")
"""Under which a method's descriptor or a decorated function has the function itself."""

_seen: set[str] = set()
_modules_seen = 0


def let_warnings_through() -> None:
    """Do so with all functions imported since the last call, and with those that they define from now on."""
    global _modules_seen
    if len(sys.modules) == _modules_seen:
        return
    _modules_seen = len(sys.modules)
    new = [name for name in sys.modules if name.startswith(PLACES) and name not in _seen]
    _seen.update(new)
    for name in new:
        own = [value for value in vars(sys.modules[name]).values() if getattr(value, "__module__", None) == name]
        for function in (function for value in own for function in functions_in(value)):
            if function.__module__ == name:
                code = seen_through(function.__code__)
                if code is not function.__code__:
                    function.__code__ = code


def seen_through(code: CodeType) -> CodeType:
    """The code, and that of the functions that it defines, under a file name that warnings pass over."""
    return code if DETOUR in code.co_filename else compat.renamed(code, _detour(code.co_filename))


@functools.cache
def _detour(file: str) -> str:
    """One string for all the functions of a file."""
    directory, name = os.path.split(file)
    return os.path.join(directory, DETOUR, os.pardir, name)


def functions_in(value: Any) -> Iterator[FunctionType]:
    """A function without what is wrapped around it, or the methods of a class."""
    if isinstance(value, type):
        for inner in vars(value).values():
            yield from functions_in(inner)
        return
    for attribute in _WRAPPINGS:
        value = getattr(value, attribute, value)
    if isinstance(value, FunctionType) and os.path.isabs(value.__code__.co_filename):  # not what a dataclass generates
        yield value
