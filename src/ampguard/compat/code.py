"""Code objects of Python's."""

from __future__ import annotations

import _imp
from collections.abc import Callable
from types import CodeType

_rename: Callable[[CodeType, str], None] | None = getattr(_imp, "_fix_co_filename", None)
"""What Python's import system itself does to code that was compiled under another path."""


def renamed(code: CodeType, file: str) -> CodeType:
    """The code under another file name, and that of the functions that it defines: as a rule the same objects.

    To make new ones takes ten times as long, and twice the memory for a while.
    """
    if _rename is not None:
        _rename(code, file)
        if code.co_filename == file:
            return code
    constants = tuple(renamed(const, file) if isinstance(const, CodeType) else const for const in code.co_consts)
    return code.replace(co_filename=file, co_consts=constants)
