"""Where a model's parameters and buffers stand, and why a model cannot get others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ampguard import compat
from ampguard.engine.casting import is_castable
from ampguard.engine.force_fp32.modules import is_forced


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter or buffer, under the name in its module's own table. `in_float32`: a module around it runs so."""

    entries: dict[str, Any]
    name: str
    tensor: Tensor
    in_float32: bool


def places_in(root: nn.Module, forced: frozenset[int] = frozenset()) -> Iterator[Place]:
    """Every place of a tensor that training precisions concern; a tied weight has several.

    `forced`: further modules that run in float32, by identity.
    """
    yield from _walk(root, forced, False, set())


def _walk(module: nn.Module, forced: frozenset[int], in_float32: bool, seen: set[int]) -> Iterator[Place]:
    if id(module) in seen:
        return
    seen.add(id(module))
    in_float32 = in_float32 or id(module) in forced or is_forced(module)
    for entries in (compat.parameters_of(module), compat.buffers_of(module)):
        for name, tensor in entries.items():
            if tensor is not None and is_castable(tensor):
                yield Place(entries, name, tensor, in_float32)
    for child in compat.children_of(module).values():
        if child is not None:
            yield from _walk(child, forced, in_float32, seen)


def why_weights_stay(root: nn.Module) -> str | None:
    """Why the weights of a model cannot be replaced for a call, and what to do; None where they can."""
    if compat.needs_other_ranks(root):
        return (
            f"the weights of {type(root).__name__} are spread over ranks (FSDP, tensor parallelism) and stay as they "
            "are; give FSDP a MixedPrecision policy in the script"
        )
    scripted = next((m for m in root.modules() if isinstance(m, torch.jit.ScriptModule)), None)
    if scripted is not None and next(scripted.parameters(), None) is not None:
        return (
            f"{type(root).__name__} holds a TorchScript module, whose weights cannot be replaced: it stays in float32; "
            "use --precision fp16 or bf16 (autocast), or leave torch.jit.script out"
        )
    return None


def is_not_made_yet(root: nn.Module) -> bool:
    """Whether a lazy module gets its weights in the coming call."""
    return any(is_lazy(p) for p in root.parameters())
