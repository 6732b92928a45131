"""Find modules by shell-style patterns over their paths, and say what was meant where nothing matches."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ampguard import compat
from ampguard.errors import PatternError

MAX_NEAREST = 4


def matching_modules(model: nn.Module, patterns: Iterable[str]) -> dict[str, nn.Module]:
    """The modules whose path matches any pattern, outermost only: what lies inside a match is covered by it.

    `*` stands for anything, dots included. "" names the model itself. Of a container the modules that it holds are
    meant. A module that is held twice may be named by either path. Raises PatternError for a pattern that matches
    nothing, or nothing that is ever called.
    """
    modules = dict(compat.named_modules(model))
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        matched = _matched(modules, pattern)
        if not matched:
            matched = _matched(dict(_further_paths(model)), pattern)
        if not matched:
            raise PatternError(_nothing_matches(pattern, type(model).__name__, list(modules)))
        called = called_in(matched)
        if not called:
            raise PatternError(_nothing_called(pattern, matched))
        found |= called
    return outermost(found)


def _matched(modules: Mapping[str, nn.Module], pattern: str) -> dict[str, nn.Module]:
    return {name: m for name, m in modules.items() if (name or not pattern) and fnmatchcase(name, pattern)}


def _further_paths(
    model: nn.Module, path: str = "", around: tuple[nn.Module, ...] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """Every path to every module: `named_modules` has one alone of each. A module that holds one around it ends there."""
    around = (*around, model)
    for name, held in compat.children_of(model).items():
        if held is not None and not any(held is one for one in around):
            yield f"{path}{name}", held
            yield from _further_paths(held, f"{path}{name}.", around)


def outermost(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Those that lie in no other one."""
    return {name: m for name, m in modules.items() if not any(_is_inside(name, other) for other in modules)}


def called_in(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """These modules, and in place of those that have no forward pass (`nn.ModuleList`, `nn.ModuleDict`) what they hold."""
    called: dict[str, nn.Module] = {}
    for name, module in modules.items():
        forward = getattr(module, "forward", None)  # a scripted module may have none
        if getattr(forward, "__func__", None) is not nn.Module.forward:
            called[name] = module
        else:
            called |= called_in(
                {f"{name}.{child}".lstrip("."): held for child, held in compat.own_children(module).items()}
            )
    return called


def listed_patterns(given: str | Sequence[str]) -> list[str]:
    """One pattern or several. Raises PatternError for modules and classes in their place."""
    several: list[Any] = list(given) if isinstance(given, (list, tuple, set, frozenset)) else [given]
    for pattern in several:
        if not isinstance(pattern, str):
            raise PatternError(
                f"force_fp32 takes patterns over the paths of modules, not a {type(pattern).__name__}\n"
                "  do    name the module as model.named_modules() does, say force_fp32=['encoder.layers.*.attn']"
            )
    return several


def nearest(word: str, names: Iterable[str]) -> list[str]:
    """The names most like `word`: by spelling, or because they end with its last part.

    >>> nearest("blocks.*.attention", ["blocks.0.attn", "blocks.1.attn", "head"])
    ['blocks.*.attn']
    """
    known = list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", f".{name}")[1:] for name in names if name))
    close = difflib.get_close_matches(word, known, MAX_NEAREST, 0.5)
    last = re.sub(r"\W", "", word.rpartition(".")[2])
    ends = [name for name in known if len(last) > 2 and last in name]
    return list(dict.fromkeys(close + ends))[:MAX_NEAREST]


def _is_inside(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


def _nothing_matches(pattern: str, model: str, names: list[str]) -> str:
    near = nearest(pattern, names)
    top = list(dict.fromkeys(name.partition(".")[0] for name in names if name))
    hint = f"nearest: {_listed(near)}" if near else f"its top modules: {_listed(top[:8]) or 'none'}"
    return (
        f"the pattern {pattern!r} matches no module of {model}; {hint}\n"
        f"  do    patterns are paths as model.named_modules() has them; `*` stands for anything"
    )


def _nothing_called(pattern: str, matched: Mapping[str, nn.Module]) -> str:
    kinds = _listed(f"{name} ({type(m).__name__})" for name, m in list(matched.items())[:MAX_NEAREST])
    return (
        f"the pattern {pattern!r} matches {kinds} only: without a forward pass, and with no module inside that has one\n"
        "  do    name a module that is called, or put @ampguard.force_fp32 on the function that computes"
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
