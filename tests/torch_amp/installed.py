"""Pieces of PyTorch's own tests, as the installed version has them.

Their modules import all that PyTorch's test suite needs; the pieces themselves need only torch. So each is compiled
alone, from the installed file.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch


def installed(module: str, name: str) -> Any:
    """The function or class `name` of `torch.testing._internal.<module>`; skips where PyTorch has it no more."""
    path = Path(torch.__file__).parent / "testing" / "_internal" / f"{module}.py"
    tree = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
    found = [n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == name]
    if not found:
        pytest.skip(f"this version of PyTorch has no {module}.{name}")
    scope: dict[str, Any] = {"torch": torch}
    if name == "_create_scaling_case":
        scope["_create_scaling_models_optimizers"] = installed(module, "_create_scaling_models_optimizers")
    exec(compile(ast.Module(found, []), str(path), "exec"), scope)
    return scope[name]
