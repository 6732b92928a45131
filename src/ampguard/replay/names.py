"""Modules by the names that the user's code gives them."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.compiled.functions import CompiledFunction
from ampguard.capture.protocol.script_lines import is_script_code
from ampguard.capture.record import Event, RootCall
from ampguard.replay.variables import named_modules, script_names

HOLDERS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)

_found_before: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
"""For modules that were found to hang in another: where."""


def module_names(root: nn.Module, prefix: str = "") -> dict[int, str]:
    """`id(module)` to dotted name for every module under `root`; no wrapper's prefix (`module.`, `_orig_mod.`).

    The root itself is `prefix` ("" where it hangs in no other module). A module that hangs in two places has its
    first name. A compiled function is no module: each that it calls is a root.
    """
    names: dict[int, str] = {}
    for module in roots_in(root):
        for known, (name, _) in compat.named_modules_of_user(module, strip_wrappers(module, prefix)).items():
            names.setdefault(known, name)
    return names


def parts_by_name(root: nn.Module, prefix: str) -> dict[str, nn.Module]:
    """The modules of a root as the user's code names them: without wrappers' prefixes."""
    names = module_names(root, prefix)
    return {names[id(module)]: module for module in compat.all_modules(root) if id(module) in names}


def roots_in(root: nn.Module) -> list[nn.Module]:
    """The module itself; in place of a compiled function the modules that it can call."""
    return list(compat.own_children(root).values()) if isinstance(root, CompiledFunction) else [root]


def names_of_called(modules: Iterable[nn.Module], prefixes: Mapping[int, str]) -> dict[int, str]:
    """`id(module)` to dotted name for all modules under those that were called; `prefixes`: of those that have one already."""
    modules = list({id(module): module for module in modules}.values())
    own = _put_around(module for module in modules if id(module) not in prefixes)
    paths = paths_in_holders(own.get(id(m), m) for m in modules if id(m) not in prefixes)
    names: dict[int, str] = {}
    for module in modules:
        root = own.get(id(module), module)
        found = module_names(root, prefixes.get(id(module)) or paths.get(id(root), ""))
        if root is not module:  # what a library put around it goes by its name
            found |= {id(around): found[id(root)] for around in compat.all_modules(module) if id(around) not in found}
        names = found | names
    return names


def _put_around(modules: Iterable[nn.Module]) -> dict[int, nn.Module]:
    """For modules that a library's call has put around one of the script's, as ODE solvers do: the script's.

    The script cannot name the outer one; it holds nothing but a single module, which the script can.
    """
    foreign = {id(module): module for module in modules if _only_child(module) is not None}
    nameable = {id(part) for top in named_modules() for part in compat.all_modules(top)} if foreign else set()
    found: dict[int, nn.Module] = {}
    for key, module in foreign.items():
        inner: nn.Module | None = module
        while inner is not None and id(inner) not in nameable:
            inner = _only_child(inner)
        if inner is not None and inner is not module:
            found[key] = inner
    return found


def _only_child(module: nn.Module) -> nn.Module | None:
    """The one module in a library's module that has no weights of its own."""
    children = [child for child in compat.children_of(module).values() if child is not None]
    forward = inspect.getattr_static(type(module), "forward", None)  # (a ScriptModule's cannot be asked)
    code = getattr(forward, "__code__", None)
    if len(children) != 1 or isinstance(module, (CompiledFunction, *HOLDERS)) or code is None or is_script_code(code):
        return None
    return None if compat.parameters_of(module) or compat.buffers_of(module) else children[0]


def strip_wrappers(root: nn.Module, prefix: str) -> str:
    """A prefix found by attribute lookup can itself run through wrappers."""
    return ".".join(part for part in prefix.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module"))


def paths_in_holders(modules: Iterable[nn.Module]) -> dict[int, str]:
    """`id(module)` to the dotted path at which a module hangs in another that the running script can name.

    Only where the script does not hold the module by itself, or the other is a mere holder (`nn.ModuleDict`): what a
    script keeps in a variable and calls is a root of its own. A path that was found stays: when the script ends, with an
    exception say, the objects that held its modules may be out of reach.
    """
    roots = {id(module): module for module in modules}
    wanted = set(roots)
    named = {id(module): module for module in named_modules()} if wanted else {}
    found: dict[int, str] = {}
    for top in sorted(named.values(), key=_size, reverse=True):  # what hangs in another is named from there
        for parent in compat.all_modules(top):
            for child in compat.children_of(parent).values():
                if id(child) in wanted - found.keys() and (isinstance(parent, HOLDERS) or id(child) not in named):
                    found[id(child)] = module_names(top)[id(child)]
    for key, path in found.items():
        if path:
            _found_before[roots[key]] = path
    return {key: _found_before[module] for key, module in roots.items() if module in _found_before}


def _size(module: nn.Module) -> int:
    return len(compat.all_modules(module))


def parameters_under(root: nn.Module, modules: dict[int, str]) -> dict[int, str]:
    """`id(parameter)` to dotted name, for the parameters of a module whose parts have the names in `modules`."""
    names: dict[int, str] = {}
    for owner in compat.all_modules(root):
        prefix = modules.get(id(owner))
        for key, parameter in compat.parameters_of(owner).items() if prefix is not None else ():
            if parameter is not None:
                names.setdefault(id(parameter), f"{prefix}.{key}" if prefix else key)
    return names


def module_of_parameter(name: str) -> str:
    """The module that a parameter belongs to, by its dotted name: the one that is parametrized, not what PyTorch puts into it.

    >>> module_of_parameter("head.weight"), module_of_parameter("fuse.parametrizations.weight.original0")
    ('head', 'fuse')
    """
    owner, is_parametrized, _ = f".{name}".partition(".parametrizations.")
    return owner.removeprefix(".") if is_parametrized else name.rpartition(".")[0]


def parameter_names(events: Iterable[Event], modules: dict[int, str]) -> dict[int, str]:
    """`id(parameter)` to dotted name, for the root modules of some events; `modules` are their parts' names.

    Where parameters of several roots would have the same name, or only some of these hang in another module, each root is
    called what the script calls it.
    """
    called = [module for event in events if isinstance(event, RootCall) for module in roots_in(event.module)]
    roots = list({id(module): module for module in called}.values())
    of_roots = [parameters_under(root, modules) for root in roots]
    names: dict[int, str] = {}
    for own in of_roots:
        names = own | names
    is_hanging = {bool(modules.get(id(root))) for root, own in zip(roots, of_roots, strict=True) if own}
    if len(set(names.values())) == len(names) and len(is_hanging) < 2:
        return names
    variables = script_names(roots)
    for root, own in zip(roots, of_roots, strict=True):
        if not modules.get(id(root)):  # else it is told apart by where it hangs
            prefix = variables.get(id(root))
            names |= {p: f"{prefix}.{name}" for p, name in own.items() if prefix and names[p] == name}
    return names


def parameter_name(parameter: Tensor, roots: Iterable[tuple[nn.Module, str]]) -> str | None:
    """The dotted name of `parameter` under one of the root modules (each with its prefix).

    Where none of them holds it, the modules of this process are asked (slow: for incidents only); None where no module
    holds it at all.
    """
    for root, prefix in roots:
        name = parameters_under(root, module_names(root, prefix)).get(id(parameter))
        if name is not None:
            return name
    for thing in gc.get_objects():
        if issubclass(type(thing), nn.Module):  # `isinstance` would ask lazy proxies, which may import things
            for key, known in compat.parameters_of(thing).items():
                if known is parameter:
                    return key
    return None
