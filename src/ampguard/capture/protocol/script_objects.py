"""Objects that the script's frames name, or that its objects hold."""

from __future__ import annotations

from types import FrameType
from typing import Any

from torch import nn

from ampguard import compat
from ampguard.capture.frames import frames_up, locals_of
from ampguard.capture.protocol.script_lines import is_script_code

MAX_FRAMES = 60
MAX_ATTRIBUTES = 200


def modules_in_frames(frame: FrameType | None) -> list[nn.Module]:
    """Modules that the script's frames name, or that their objects hold, from `frame` on outwards."""
    found: list[nn.Module] = []
    for outer in frames_up(frame, MAX_FRAMES):
        if not is_script_code(outer.f_code):
            continue
        for value in [*locals_of(outer).values(), *outer.f_globals.values()]:
            if isinstance(value, nn.Module):
                found.append(value)
            elif not isinstance(value, type) and type(value).__module__ not in ("builtins", "torch"):
                inner = attributes_of(value) or {}
                found += [v for v in list(inner.values())[:MAX_ATTRIBUTES] if isinstance(v, nn.Module)] if inner else []
    return [module for module in found if compat.is_built(module)]


def attributes_of(value: object) -> Any:
    """Its `__dict__`, past a `__getattribute__` of its own: a script's names may warn when they are looked at."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
