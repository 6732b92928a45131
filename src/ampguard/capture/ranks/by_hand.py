"""Models without a wrapper whose gradients the script may average over the ranks itself.

A script may start independent runs under one torchrun, and then nothing has to be alike. But gradients that are the same on
two ranks, bit for bit, were averaged (or made from the same weights and the same batch): then the weights have to be the
same as well. So both are summed up, and weights are judged only where the gradients are equal.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.ranks.past_wrapper import PastWrapper
from ampguard.capture.record import RootCall
from ampguard.numerics import bit_sum

GRADIENT = "gradient of "
"""Before the names of the sums that are of gradients."""

FIRST_NUMBER = 1000
"""Their numbers begin behind those of the DDP models: a rank may call a model more than another does."""

MOST = 4
"""Models that are followed."""


class Unwrapped:
    """A model that a loop calls as it is. `ranks`: all of the launch."""

    by_hand = True

    def __init__(self, module: nn.Module, number: int) -> None:
        self.number = number
        self.ranks = list(range(torch.distributed.get_world_size()))
        self.past: PastWrapper | None = None
        self._module = weakref.ref(module)

    def sums(self) -> tuple[list[str], list[Tensor]] | None:
        """Names and bit sums of its weights and of their gradients; None where it has none that lie here as a whole."""
        module = self._module()
        named = trained(module) if module is not None else []
        if not named:
            return None
        with torch.no_grad(), compat.unseen():
            weights = [bit_sum(p) for _, p in named]
            gradients = [bit_sum(p.grad) for _, p in named if p.grad is not None]
        return [name for name, _ in named] + [GRADIENT + name for name, _ in named], weights + gradients


class UnwrappedModels:
    """The roots that were called, in their order, and that no wrapper of PyTorch's keeps alike."""

    def __init__(self) -> None:
        self.known: list[Unwrapped] = []
        self._looked_at: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def look(self, calls: Sequence[RootCall]) -> None:
        """Find those among what an iteration has called with gradients."""
        if len(self.known) >= MOST or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        for call in calls:
            root = call.module
            if not call.modes.grad or root in self._looked_at:
                continue
            self._looked_at.add(root)
            if len(self.known) < MOST and not is_wrapped(root) and trained(root):
                self.known.append(Unwrapped(root, FIRST_NUMBER + len(self.known)))


def trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Its parameters that have a gradient now; none where any is spread over ranks (a DTensor)."""
    named = [(name, p) for name, p in module.named_parameters() if p.grad is not None and not p.grad.is_sparse]
    return [] if any(compat.local_part(p) is not p for _, p in named) else named


def is_wrapped(module: nn.Module) -> bool:
    """Whether it, or a part of it, is a wrapper that sees to gradients or weights itself (DDP, FSDP)."""
    return any(
        type(m).__module__.startswith("torch.distributed.") or "nn.parallel" in type(m).__module__
        for m in module.modules()
    )


def equal_gradients(names: Sequence[str], mine: Sequence[int], theirs: Sequence[int]) -> bool:
    """Whether all gradients are the same on both ranks, and not all of them nothing."""
    pairs = [(a, b) for name, a, b in zip(names, mine, theirs, strict=True) if name.startswith(GRADIENT)]
    return any(a for a, _ in pairs) and all(a == b for a, b in pairs)
