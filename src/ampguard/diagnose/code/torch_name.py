"""Fixes in the names of the file that they are written into: one that says `import torch as th` knows no `torch`."""

from __future__ import annotations

import ast
import linecache
import re
import sys

import msgspec

from ampguard.diagnose.code.source import Source
from ampguard.incident import Incident

_TORCH = re.compile(r"(?<![\w.'\"])torch\.(?=\w)")


def in_names_of_its_file(incident: Incident) -> Incident:
    """The incident with PyTorch called in its fixes as its file calls it; the script itself where that one has no name for it."""
    if not any(_TORCH.search(fix.how) for fix in incident.fixes):
        return incident
    files = (incident.location.file if incident.location is not None else None, _script())
    name = next((name for file in files if file and (name := _name_of_torch(file))), "torch")
    if name == "torch":
        return incident
    fixes = tuple(msgspec.structs.replace(fix, how=_TORCH.sub(f"{name}.", fix.how)) for fix in incident.fixes)
    return msgspec.structs.replace(incident, fixes=fixes)


def _script() -> str | None:
    return getattr(sys.modules.get("__main__"), "__file__", None)


def _name_of_torch(file: str) -> str | None:
    """What PyTorch is called in a file: "torch" wherever that may be a name of it; None where it has none."""
    source = Source.of("".join(linecache.getlines(file)))
    if source is None:
        return None
    bound: dict[str, str] = {}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            bound |= {name.asname or name.name.partition(".")[0]: name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            bound |= {name.asname or name.name: "" for name in node.names}
    if "torch" in bound or "*" in bound:
        return "torch"
    return next((name for name, module in bound.items() if module == "torch"), None)
