"""Models without a wrapper whose gradients the script may average over the ranks itself.

A script may start independent runs under one torchrun, and then nothing has to be alike. But gradients that are the same on
two ranks, bit for bit, were averaged (or made from the same weights and the same batch): then the weights have to be the
same as well. So both are summed up, and weights are judged only where the gradients are equal.

Where only some are equal, the script may have forgotten the others, or trains them on each rank by itself on purpose. They
are told as forgotten where their weights began alike, gradients were reduced by the script, and its forward pass sends
nothing (layers that are spread over ranks do).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.ranks.collectives import Collectives
from ampguard.capture.ranks.past_wrapper import PastWrapper
from ampguard.capture.record import Line, RootCall
from ampguard.numerics import bit_sum

GRADIENT = "gradient of "
"""Before the names of the sums that are of gradients."""

BEGAN = "first values of "
"""Before those of the weights before the first update."""

FIRST_NUMBER = 1000
"""Their numbers begin behind those of the DDP models: a rank may call a model more than another does."""

MOST = 4
"""Models that are followed."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """How gradients are averaged. `matrices`: the parameters that are no vectors; of no two ranks the gradients of such a one
    are the same by chance. None where a DDP model beside them averages its own. `line`: where the script reduces, or wraps."""

    matrices: frozenset[str] | None
    line: Line
    wrapped: int | None = None
    """How many weights that DDP model holds."""
    is_behind_unscale: bool = False
    """The scaler had divided the gradients by then, and looked whether they are finite."""


class Unwrapped:
    """A model that a loop calls as it is. `ranks`: all of the launch."""

    by_hand = True

    def __init__(self, module: nn.Module, number: int) -> None:
        self.number = number
        self.ranks = list(range(torch.distributed.get_world_size()))
        self.past: PastWrapper | None = None
        self.reduced: Reduced | None = None
        """How the script averages gradients; None where it does not, or sends something in the model's forward pass."""
        self._module = weakref.ref(module)
        self._began: dict[str, Tensor] = {}

    def begins(self) -> None:
        """No optimizer has stepped yet: note the weights as they are."""
        module = self._module()
        with torch.no_grad(), compat.unseen():
            self._began = {name: bit_sum(p) for name, p in trained(module)} if module is not None else {}

    def looks_at(
        self, calls: Sequence[RootCall], collectives: Collectives, reduced_at: Line | None, is_behind_unscale: bool
    ) -> None:
        """See what an iteration has done. `reduced_at`: where it has reduced what may be gradients."""
        module = self._module()
        self.reduced = None
        if reduced_at is not None and module is not None:
            own_calls = (call.index for call in calls if call.module is module)
            if not collectives.are_in(own_calls):
                matrices = frozenset(name for name, p in trained(module) if p.dim() > 1)
                self.reduced = Reduced(matrices, reduced_at, is_behind_unscale=is_behind_unscale)

    def sums(self) -> tuple[list[str], list[Tensor]] | None:
        """Names and bit sums of its weights and of their gradients; None where it has none that lie here as a whole."""
        module = self._module()
        named = trained(module) if module is not None else []
        if not named:
            return None
        with torch.no_grad(), compat.unseen():
            weights = [bit_sum(p) for _, p in named]
            gradients = [bit_sum(p.grad) for _, p in named if p.grad is not None]
        names = [name for name, _ in named] + [GRADIENT + name for name, _ in named] + [BEGAN + n for n in self._began]
        return names, [*weights, *gradients, *self._began.values()]


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
    named = [
        (name, p) for name, p in compat.named_parameters(module).items() if p.grad is not None and not p.grad.is_sparse
    ]
    return [] if any(compat.local_part(p) is not p for _, p in named) else named


def is_wrapped(module: nn.Module) -> bool:
    """Whether it, or a part of it, is a wrapper that sees to gradients or weights itself (DDP, FSDP)."""
    return any(is_wrapper(m) for m in compat.all_modules(module))


def is_wrapper(module: nn.Module) -> bool:
    """Whether it is itself such a wrapper."""
    return type(module).__module__.startswith("torch.distributed.") or "nn.parallel" in type(module).__module__


def is_weight(name: str) -> bool:
    """Whether a sum is of a weight as it is now."""
    return not name.startswith((GRADIENT, BEGAN))


def equal_gradients(names: Sequence[str], mine: Sequence[int], theirs: Sequence[int]) -> bool:
    """Whether all gradients are the same on both ranks, and not all of them nothing."""
    pairs = [(a, b) for name, a, b in zip(names, mine, theirs, strict=True) if name.startswith(GRADIENT)]
    return any(a for a, _ in pairs) and all(a == b for a, b in pairs)


def left_out(
    names: Sequence[str], mine: Sequence[int], theirs: Sequence[int], matrices: frozenset[str] | None
) -> tuple[list[str], list[str]]:
    """Weights that began alike and whose gradients are each rank's own; and those whose gradients are the same on both ranks.

    Nothing where no matrix's are (unless `matrices` is None), or where all weights are alike still.
    """
    pairs = {name: (a, b) for name, a, b in zip(names, mine, theirs, strict=True)}
    gradients = {name: pairs[GRADIENT + name] for name in names if is_weight(name)}
    same = [name for name, (a, b) in gradients.items() if a == b != 0]
    own = [name for name, (a, b) in gradients.items() if a != b]
    began = [pairs.get(BEGAN + name) for name in own]
    began_alike = all(pair is not None and pair[0] == pair[1] for pair in began)
    are_unlike = any(pairs[name][0] != pairs[name][1] for name in own)
    others_are_averaged = matrices is None or not matrices.isdisjoint(same)
    return (own, same) if began_alike and are_unlike and others_are_averaged else ([], [])
