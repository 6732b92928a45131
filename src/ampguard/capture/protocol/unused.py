"""How much of a model its unused parameters are, and whether the script or a library left them unused.

A pooler that a library's model computes for other tasks, or a bias beside a weight that is trained, costs nothing; a
branch of the script's own that forward never reaches is most likely forgotten. Told by who attached the unused part.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.protocol.script_lines import is_library_file

SMALL_SHARE = 0.15
"""Of a model's trainable elements: a pooler is one square layer, beside a block of at least six in the smallest encoder."""
FEW = 8
"""Parameters."""
SHARE_OF_VARIANTS = 0.01
"""Of a model's trainable elements: the norms that some blocks of a residual network leave out."""
NO_LAYERS = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def unused_facts(roots: Iterable[nn.Module], unused: list[Tensor], trained: list[Tensor]) -> dict[str, object]:
    """`elements` of the unused parameters, `of_elements` of all, and `left_by`: who attached the unused parts.

    `left_by` is "library" where every unused part hangs in a module of an installed library, "sibling" where each is
    the bias of one of PyTorch's layers whose weight is trained (or of such a library), "variant" where some hang in a block
    that is trained without them, while blocks of the same class train theirs, "script" otherwise.
    """
    roots = list(roots)
    ids, held = {id(p) for p in unused}, {id(p) for p in trained}
    kinds: dict[int, str] = {}
    for root in roots:
        for parameter, kind in _kinds(compat.unwrapped(root), ids, held):
            kinds.setdefault(id(parameter), kind)
    variants = _of_variants(roots, ids, held)
    found = {
        "variant" if kind == "script" and i in variants else kind for i in ids for kind in [kinds.get(i, "script")]
    }
    left_by = next(kind for kind in ("script", "variant", "sibling", "library") if kind in found)
    return {
        "elements": sum(p.numel() for p in unused),
        "of_elements": sum(p.numel() for p in trained),
        "left_by": left_by,
        "is_harmless": is_small(unused, trained, left_by),
        "alike": trained_alike(roots, unused, trained),
    }


def trained_alike(roots: Iterable[nn.Module], unused: list[Tensor], trained: list[Tensor]) -> int:
    """How many items of a list (or dictionary) of modules are built like the unused one in it and are trained: experts, heads.

    The fewest, where there are several; 0 where an unused parameter lies in no such item.
    """
    ids, found = {id(p) for p in unused}, dict[int, int]()
    used = {id(p) for p in trained} - ids
    lists = (
        m
        for root in roots
        for m in compat.all_modules(compat.unwrapped(root))
        if isinstance(m, (nn.ModuleList, nn.ModuleDict))
    )
    for items in lists:
        parts = [compat.all_parameters(child) for child in compat.children_of(items).values() if child is not None]
        for part in parts:
            if part and all(id(p) in ids for p in part):
                shapes = [p.shape for p in part]
                alike = [o for o in parts if [p.shape for p in o] == shapes and any(id(p) in used for p in o)]
                found |= {id(p): len(alike) for p in part}
    return min((found.get(i, 0) for i in ids), default=0)


def replaced_by_tying(roots: Iterable[nn.Module], unused: list[Tensor]) -> bool:
    """Whether all of them have the shape of a parameter that hangs in two places and are in no module themselves."""
    names: dict[int, int] = {}
    tied: set[tuple[int, ...]] = set()
    for root in roots:
        for _, parameter in compat.named_parameters(root, remove_duplicate=False).items():
            names[id(parameter)] = names.get(id(parameter), 0) + 1
            if names[id(parameter)] == 2:
                tied.add(tuple(parameter.shape))
    return bool(unused) and all(id(p) not in names and tuple(p.shape) in tied for p in unused)


def is_small(unused: list[Tensor], trained: list[Tensor], left_by: str) -> bool:
    """Whether the unused parameters are few and a small share of all elements; of variants, however many there are."""
    share = sum(p.numel() for p in unused) / max(sum(p.numel() for p in trained), 1)
    if left_by == "variant":
        return share <= SHARE_OF_VARIANTS
    return left_by != "script" and len(unused) <= FEW and share <= SMALL_SHARE


def _of_variants(roots: list[nn.Module], unused: set[int], held: set[int]) -> set[int]:
    """The unused parameters that lie in a block beside trained ones, where another block of its class trains its own."""
    blocks: dict[int, tuple[nn.Module, dict[str, Tensor]]] = {}
    for root in roots:
        for module in compat.all_modules(compat.unwrapped(root)):
            if not type(module).__module__.startswith("torch."):
                blocks[id(module)] = module, _own_parameters(module)
    is_trained = held - unused
    used = {(type(block), path) for block, own in blocks.values() for path, p in own.items() if id(p) in is_trained}
    return {
        id(p)
        for block, own in blocks.values()
        for path, p in own.items()
        if id(p) in unused
        and (type(block), path) in used
        and any(id(other) in is_trained for other in compat.all_parameters(block))
    }


def _own_parameters(block: nn.Module) -> dict[str, Tensor]:
    """Those of the block and of PyTorch's layers in it, by their names there; not of other blocks in it."""
    found: dict[str, Tensor] = {name: p for name, p in compat.parameters_of(block).items() if p is not None}
    for name, child in compat.children_of(block).items():
        if child is not None and type(child).__module__.startswith("torch."):
            found |= {f"{name}.{inner}": p for inner, p in _own_parameters(child).items()}
    return found


def _kinds(root: nn.Module, unused: set[int], held: set[int]) -> Iterator[tuple[Tensor, str]]:
    """Each unused parameter under `root`, and who left it unused."""
    stack: list[tuple[nn.Module, nn.Module | None]] = [(root, None)]
    seen: set[int] = set()
    while stack:
        module, owner = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        inside = [p for p in compat.all_parameters(module) if id(p) in held]
        if inside and all(id(p) in unused for p in inside):
            kind = "library" if owner is not None and _is_of_library(owner) else "script"
            yield from ((p, kind) for p in inside)
            continue
        own = [p for p in compat.parameters_of(module).values() if p is not None]
        is_layer = _is_pytorchs_layer(module) and any(p.dim() > 1 for p in own)
        for p in own:
            if id(p) in unused:
                yield p, "library" if _is_of_library(module) else "sibling" if is_layer and p.dim() <= 1 else "script"
        inner = owner if isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)) else module
        stack += [(child, inner) for child in compat.children_of(module).values() if child is not None]


def _is_pytorchs_layer(module: nn.Module) -> bool:
    """Whether the module is one of PyTorch's layers, or of a class that the script has derived from one."""
    return any(kind.__module__.startswith("torch.nn.") for kind in type(module).__mro__ if kind not in NO_LAYERS)


def _is_of_library(module: nn.Module) -> bool:
    """Whether the module's class comes from an installed library that builds models (not from torch itself)."""
    name = type(module).__module__
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and name.partition(".")[0] != "torch" and is_library_file(file)
