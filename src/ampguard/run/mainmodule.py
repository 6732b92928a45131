"""Be `__main__`: what Python sets up between its command line and a script's first line.

Scripts look at `sys.argv`, `sys.path[0]`, `__file__` and `sys.modules["__main__"]`; pickling and spawned workers look
`__main__` up by name long after the top level ended. So the script gets a real module that stays in `sys.modules`.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import pkgutil
import runpy
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, ModuleSpec, PathFinder, SourceFileLoader, SourcelessFileLoader
from pathlib import Path

STDIN = "-"
"""The name of a script that is read from standard input."""


@dataclass(frozen=True)
class ScriptTarget:
    """What to run: a script (or a directory or zip file with a `__main__.py`), or with `is_module` a module."""

    name: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def stem(self) -> str:
        """A short name for folders and headings: `train` for `src/train.py`, `pkg.train` for `-m pkg.train`."""
        if self.is_module:
            return self.name
        return "stdin" if self.name == STDIN else Path(self.name).stem or "script"


@dataclass(frozen=True)
class Program:
    """A target that is ready to run. `starts` is False where running it can only end in Python's own error message."""

    run: Callable[[], object]
    starts: bool = True


def prepare(target: ScriptTarget) -> Program:
    """Become `__main__` for `target` and compile it, without running any of its code.

    Raises `OSError` for a script that cannot be opened and `SyntaxError` for one that cannot be compiled.
    """
    main = _fresh_main()
    if target.is_module:
        return _prepare_module(target)
    if target.name == STDIN:
        return _prepare_stdin(target, main)
    if (importer := pkgutil.get_importer(target.name)) is not None:
        return _prepare_container(target, importer)
    return _prepare_script(target, main)


def absolute_path(name: str) -> str:
    """`name` as Python spells it in `__file__`: joined to the working directory, nothing resolved or tidied."""
    return os.path.join(_working_directory(), name)


def _working_directory() -> str:
    """Nothing where it has been deleted: Python starts a script that is named by its whole path all the same."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def _prepare_script(target: ScriptTarget, main: types.ModuleType) -> Program:
    path = absolute_path(target.name)
    loader = (SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader)("__main__", path)
    code = _code_of(loader, path)
    main.__dict__.update(__loader__=loader, __file__=path, __cached__=None)
    _enter(target, argv0=target.name, path0=os.path.dirname(os.path.realpath(path)))
    return Program(lambda: exec(code, main.__dict__))


def _prepare_stdin(target: ScriptTarget, main: types.ModuleType) -> Program:
    """`python -`: all there is to read is the script, which finds nothing more in it."""
    path = "<stdin>"  # as Python spells it, in `__file__` too
    code = compile(sys.stdin.buffer.read() if sys.stdin is not None else b"", path, "exec", dont_inherit=True)
    main.__dict__.update(__loader__=BuiltinImporter, __file__=path, __cached__=None)
    _enter(target, argv0=STDIN, path0="")
    return Program(lambda: exec(code, main.__dict__))


def _code_of(loader: SourceFileLoader | SourcelessFileLoader, path: str) -> types.CodeType:
    if isinstance(loader, SourcelessFileLoader):
        code = loader.get_code("__main__")
        assert code is not None  # only a loader of C extensions answers None
        return code
    # dont_inherit: our own `from __future__ import annotations` must not leak into the script.
    return compile(loader.get_data(path), path, "exec", dont_inherit=True)


def _prepare_module(target: ScriptTarget) -> Program:
    # The interpreter itself calls this function of runpy's for `python -m`: the same errors, the same traceback lines.
    _enter(target, argv0="-m", path0=_working_directory())
    return Program(
        lambda: runpy._run_module_as_main(target.name),  # type: ignore[attr-defined]
        starts=_module_can_start(target.name),
    )


def _prepare_container(target: ScriptTarget, importer: object) -> Program:
    """A directory or a zip file: Python puts it first on the path and runs the `__main__` that it finds there."""
    _enter(target, argv0=target.name, path0=absolute_path(target.name))
    find_spec = getattr(importer, "find_spec", None)
    spec = find_spec("__main__") if find_spec is not None else None
    return Program(
        lambda: runpy._run_module_as_main("__main__", alter_argv=False),  # type: ignore[attr-defined]
        starts=spec is not None and _compiles(spec),
    )


def _fresh_main() -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    # Kept: what ran as __main__ until now (our own entry point) is still executing.
    main_before.append(sys.modules.get("__main__"))
    sys.modules["__main__"] = main
    return main


main_before: list[types.ModuleType | None] = []


def _enter(target: ScriptTarget, argv0: str, path0: str) -> None:
    sys.argv = [argv0, *target.args]
    if not getattr(sys.flags, "safe_path", False):  # python -P, since 3.11: the path starts with no such entry
        sys.path[0] = path0


def _module_can_start(name: str) -> bool:
    """Whether `python -m name` gets as far as the module's first line, found out without importing anything."""
    top, *parts = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
        found = top
        while spec is not None and (parts or spec.submodule_search_locations is not None):
            found = f"{found}.{parts.pop(0) if parts else '__main__'}"
            inner = PathFinder.find_spec(found, spec.submodule_search_locations)
            if inner is None and _has_dynamic_path(spec):
                return True
            spec = inner
    except KeyError:  # a namespace package inside another: only importing the outer one would tell
        return True
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None and _compiles(spec)


def _has_dynamic_path(spec: ModuleSpec) -> bool:
    """Whether a package's `__init__` may look for its modules elsewhere, which only running it would tell."""
    try:
        return spec.origin is not None and b"__path__" in Path(spec.origin).read_bytes()
    except OSError:
        return False


def _compiles(spec: ModuleSpec) -> bool:
    get_code = getattr(spec.loader, "get_code", None)
    try:
        return get_code is not None and get_code(spec.name) is not None
    except (ImportError, SyntaxError, ValueError, OSError):
        return False
