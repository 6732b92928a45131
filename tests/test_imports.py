"""Which room imports which, as docs/development.md draws it, and where names that PyTorch keeps to itself may stand.

Read from the source as text: nothing is imported, and what is imported inside functions counts as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"

GROUND = {"compat", "errors", "incident", "numerics", "stderr", "threads"}
MAY_IMPORT = {
    "_version": set[str](),
    "compat": set[str](),
    "errors": set[str](),
    "incident": set[str](),
    "numerics": {"compat"},
    "precisions": set[str](),
    "stderr": set[str](),
    "threads": set[str](),
    "protocol": set[str](),
    "report": {"errors", "incident", "stderr", "threads"},
    "capture": GROUND | {"protocol"},
    "replay": GROUND | {"capture"},
    "diagnose": GROUND | {"protocol", "capture", "replay"},
    "engine": GROUND | {"precisions", "protocol"},
    "run": GROUND | {"protocol", "capture", "replay", "diagnose", "engine", "report"},
    "integrations": GROUND | {"engine", "run"},
    "compare": {"errors", "incident", "report"},
    "check": GROUND | {"_version"},
    "cli": {"_version", "errors", "incident", "precisions", "check", "compare", "report", "run"},
    "__main__": {"cli"},
    "": {"_version", "errors", "incident", "engine", "run"},
}
"""By room; "" is the front door, which nobody inside goes through."""

WITHOUT_TORCH = {
    "",
    "__main__",
    "_version",
    "cli",
    "compare",
    "errors",
    "incident",
    "precisions",
    "protocol",
    "report",
    "stderr",
    "threads",
}

PYTHONS_OWN = {
    "_args", "_exit", "_getframe", "_make", "_fields", "_reconstructor", "_replace", "_run_module_as_main", "_shutdown",
    "_target", "_process_counter", "_DummyThread",
}  # fmt: skip
"""Names of Python's library that begin like private ones, most of them documented."""

PYTORCHS = {"_backward_hooks", "_base", "_buffers", "_forward_hooks", "_forward_pre_hooks", "_grad", "_modules",
            "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_parameters", "_per_optimizer_states",
            "_scale", "_growth_tracker", "_version"}  # fmt: skip
"""Names that are PyTorch's wherever they stand on another object than `self`, though classes of ours have some of them."""


@dataclass
class Facts:
    """What one file imports and which private names it touches, with the lines; and those that it gives to something."""

    file: Path
    imports: list[tuple[int, str]] = field(default_factory=list)
    private: list[tuple[int, str]] = field(default_factory=list)
    given: set[str] = field(default_factory=set)

    def note(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            self.imports += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{self.file}:{node.lineno} imports by a relative path"
            self.imports += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            if not is_self(node.value) and not ast.unparse(node).startswith("torch.ops."):  # the name of an operator
                self.private.append((node.lineno, node.attr))
            elif is_self(node.value) and isinstance(node.ctx, ast.Store):
                self.given.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and is_private(name.value):
                self.private.append((node.lineno, name.value))
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            self.given.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            self.given.add(node.target.id)


BY_NAME = ("getattr", "hasattr", "setattr", "delattr")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != ""


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


@cache
def source() -> dict[str, Facts]:
    """By the full name of the module."""
    found = {}
    for file in sorted((SOURCE / "ampguard").rglob("*.py")):
        name = ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        facts = found[name] = Facts(file)
        for node in ast.walk(tree_of(file)):
            facts.note(node)
    return found


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def room_of(name: str) -> str:
    return (*name.split("."), "")[1]


def of_room(room: str) -> list[Facts]:
    return [facts for name, facts in source().items() if room_of(name) == room]


def test_every_room_is_drawn() -> None:
    assert {room_of(name) for name in source()} == MAY_IMPORT.keys()


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_arrows_point_one_way(room: str) -> None:
    allowed = MAY_IMPORT[room] | {room}
    assert [
        f"{facts.file}:{line} imports {name}"
        for facts in of_room(room)
        for line, name in facts.imports
        if name.partition(".")[0] == "ampguard" and room_of(name) not in allowed
    ] == []


def test_rooms_that_only_read_a_run_need_no_torch() -> None:
    assert [
        f"{facts.file}:{line} imports {name}"
        for room in WITHOUT_TORCH
        for facts in of_room(room)
        for line, name in facts.imports
        if name.partition(".")[0] == "torch"
    ] == []


def test_no_module_imports_itself_through_others() -> None:
    """Counting what is imported as a module is: not within functions, not for types alone."""
    names = source().keys()
    behind = {name: set[str]() for name in names}
    for name, facts in source().items():
        found = {n if n in names else n.rpartition(".")[0] for n in at_once(tree_of(facts.file).body)}
        behind[name] = found & names - {name}
    while free := {name for name, found in behind.items() if not found}:
        behind = {name: found - free for name, found in behind.items() if name not in free}
    assert behind == {}


def at_once(body: list[ast.stmt]) -> Iterator[str]:
    """What the statements of a module import as they run."""
    for node in body:
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from at_once(node.body + node.orelse)
        elif isinstance(node, (ast.Try, ast.With)):
            yield from at_once(node.body)


def others_names(facts: Facts) -> list[str]:
    """What a file touches or imports that somebody else keeps to himself."""
    own = set.union(*(each.given for each in source().values())) - PYTORCHS
    touched = [(line, name) for line, name in facts.private if name not in own | PYTHONS_OWN]
    found = [f"{facts.file}:{line} touches {name}" for line, name in touched if not name.startswith("_ampguard")]
    return found + [
        f"{facts.file}:{line} imports {name}"
        for line, name in facts.imports
        if name.startswith("torch.") and any(map(is_private, name.split(".")))
    ]


def test_private_names_stand_in_the_compatibility_room() -> None:
    """Integrations touch other frameworks' names too, each in the one file of that framework; none of PyTorch's."""
    rooms = [room for room in MAY_IMPORT if room not in ("compat", "integrations")]
    assert [found for room in rooms for facts in of_room(room) for found in others_names(facts)] == []
    of_integrations = [found for facts in of_room("integrations") for found in others_names(facts)]
    assert [found for found in of_integrations if "imports" in found] == []
