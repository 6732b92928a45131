"""What each module of a model returns in one call, kept small: a sample of the elements, and which are not finite."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ampguard.engine.casting import tensors_in

SAMPLED = 1 << 14
"""Elements kept of a tensor, evenly spaced."""


@dataclass(slots=True)
class ModuleCall:
    """One call of a module: samples of the floating tensors that it was given and that it returned."""

    inputs: list[Tensor]
    outputs: list[Tensor]


@dataclass(slots=True)
class ModuleOutputs:
    """The calls of every module, by name, in order."""

    calls: dict[str, list[ModuleCall]] = field(default_factory=dict)

    @contextlib.contextmanager
    def of(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Listen to the modules (by name) inside the block."""
        handles = [
            module.register_forward_hook(self._hook(name), with_kwargs=True)
            for name, module in modules.items()
            if not isinstance(module, torch.jit.ScriptModule)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Any:
        def returned(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.calls.setdefault(name, []).append(ModuleCall(samples((args, kwargs)), samples(output)))

        return returned


def samples(tree: Any) -> list[Tensor]:
    """Of every floating tensor at most `SAMPLED` elements, in float64."""
    return [sample(t) for t in tensors_in(tree) if t.is_floating_point() and t.layout == torch.strided]


def sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: -(-flat.numel() // SAMPLED) or 1].double()


def relative_error(found: list[Tensor], exact: list[Tensor]) -> tuple[float, float] | None:
    """(the largest ||found - exact|| / ||exact|| of the tensors, the largest share that is finite only in `exact`).

    Over the elements that are finite in both. None where the tensors are not the same ones, or not finite in `exact`.
    """
    if len(found) != len(exact) or any(a.shape != b.shape for a, b in zip(found, exact, strict=True)):
        return None
    errors: list[float] = []
    lost: list[float] = []
    for a, b in zip(found, exact, strict=True):
        is_exact = b.isfinite()
        if not is_exact.any():
            continue
        both = is_exact & a.isfinite()
        size = float(torch.where(both, b, 0.0).norm())
        apart = float(torch.where(both, a - b, 0.0).norm())
        errors.append(apart / size if size else float(apart > 0))
        lost.append(float((is_exact & ~both).double().mean()))
    return (max(errors), max(lost)) if errors else None
