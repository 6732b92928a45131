"""What a cause means: the page that its file's docstring is, read without importing anything.

Every cause lives in `ampguard/diagnose/causes/<code>.py`, those of the AMP protocol in `ampguard/diagnose/protocol/<code>.py`.
These files import torch; to read a page one must not wait for that.
"""

from __future__ import annotations

import ast
import difflib
from pathlib import Path

from ampguard.errors import UsageError
from ampguard.incident import CAUSES

_CAUSE_FILES = Path(__file__).parents[1] / "diagnose" / "causes"
_PROTOCOL_FILES = _CAUSE_FILES.parent / "protocol"
_DYNAMICS_FILES = _CAUSE_FILES.parent / "dynamics"


def explain(code: str) -> str:
    """The page of the cause `code`. Raises `UsageError` that names the nearest codes."""
    if code not in CAUSES:
        raise UsageError(_unknown(code))
    return page_of(code) or f"{code}: {CAUSES[code]}"


def list_causes() -> str:
    """All codes with their one-line meanings."""
    width = max(len(code) for code in CAUSES)
    return "\n".join(f"{code:<{width}}  {meaning}" for code, meaning in CAUSES.items())


def page_of(code: str) -> str | None:
    """The docstring of the cause's file, or None where there is none (yet)."""
    files = [folder / f"{code.replace('-', '_')}.py" for folder in (_CAUSE_FILES, _PROTOCOL_FILES, _DYNAMICS_FILES)]
    file = next((file for file in files if file.is_file()), None)
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) if file is not None else None


def _unknown(code: str) -> str:
    nearest = difflib.get_close_matches(code.lower().replace("_", "-"), CAUSES, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(nearest)}?" if nearest else "`ampguard explain` lists all codes"
    return f"no cause is called {code!r}; {hint}"
