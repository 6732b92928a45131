"""Fixes in the names of the file that they are written into: one that says `import torch as th` knows no `torch`.

A line that needs a module which its file does not import says so behind it.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
from pathlib import Path

import msgspec

from ampguard.diagnose.code.source import Source
from ampguard.incident import Incident

_TORCH = re.compile(r"(?<![\w.'\"])torch\.(?=\w)")
_PLACE = re.compile(r"  # (\S+):\d+$")
"""Behind a line that is not the one that is accused."""
_MATH = re.compile(r"(?<![\w.'\"])math\.(?=\w)")


def in_names_of_its_file(incident: Incident) -> Incident:
    """The incident with PyTorch called in its fixes as its file calls it; the script itself where that one has no name for it."""
    if not any(_TORCH.search(fix.how) or _MATH.search(fix.how) for fix in incident.fixes):
        return incident
    incident = _with_imports(incident)
    files = (incident.location.file if incident.location is not None else None, _script())
    name = next((name for file in files if file and (name := _name_of("torch", file))), "torch")
    if name == "torch":
        return incident
    fixes = tuple(msgspec.structs.replace(fix, how=_TORCH.sub(f"{name}.", fix.how)) for fix in incident.fixes)
    return msgspec.structs.replace(incident, fixes=fixes)


def _with_imports(incident: Incident) -> Incident:
    """With what has to be imported behind the lines that need it."""
    if incident.location is None:
        return incident
    file = incident.location.file
    missing = [(p, m) for p, m in ((_TORCH, "torch"), (_MATH, "math")) if _name_of(m, file) is None]
    if not missing or not linecache.getlines(file):
        return incident
    fixes = []
    for fix in incident.fixes:
        needed = [module for pattern, module in missing if pattern.search(fix.how)]
        place = _PLACE.search(fix.how)
        is_elsewhere = place is not None and place[1] != Path(file).name
        if needed and not is_elsewhere and Source.of(fix.how) is not None:
            fix = msgspec.structs.replace(fix, how=f"{fix.how}{', ' if place else '  # '}import {', '.join(needed)}")
        fixes.append(fix)
    return msgspec.structs.replace(incident, fixes=tuple(fixes))


def _script() -> str | None:
    return getattr(sys.modules.get("__main__"), "__file__", None)


def _name_of(module: str, file: str) -> str | None:
    """What a module is called in a file: its own name wherever that may be a name of it; None where it has none."""
    source = Source.of("".join(linecache.getlines(file)))
    if source is None:
        return None
    bound: dict[str, str] = {}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            bound |= {name.asname or name.name.partition(".")[0]: name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            bound |= {name.asname or name.name: "" for name in node.names}
    if module in bound or "*" in bound:
        return module
    return next((name for name, known in bound.items() if known == module), None)
