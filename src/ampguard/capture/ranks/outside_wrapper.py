"""Weights that a step trains beside a DDP model and that lie in none: a head or a criterion that was not wrapped.

DDP averages the gradients of what it wraps. Of the others, each rank makes its own update. That may be meant (a personal head,
layers that are spread over ranks), so they are told as forgotten only where they began alike, and where nothing is sent on
the step's way to the loss.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ampguard import compat
from ampguard.capture.ranks.by_hand import BEGAN, GRADIENT, Reduced, is_wrapper
from ampguard.capture.ranks.collectives import Collectives
from ampguard.capture.ranks.past_wrapper import PastWrapper
from ampguard.capture.ranks.replicas import Replica, Replicas
from ampguard.capture.record import Line, RootCall
from ampguard.numerics import bit_sum

NUMBER = 2000
"""Behind those of the models without a wrapper."""


class OutsideWrapper:
    """Those of one process, found as the first update is about to be made. `ranks`: of the DDP model beside them."""

    by_hand = True
    number = NUMBER

    def __init__(self, named: list[tuple[str, nn.Parameter]], replica: Replica, line: Line) -> None:
        """`line`: where the step calls the DDP model, or what holds it."""
        self.ranks = replica.ranks
        self.past: PastWrapper | None = None
        self.reduced: Reduced | None = None
        """Set where the last iteration that was looked at has let DDP average, and has sent nothing itself before the loss."""
        self._named = [(name, weakref.ref(parameter)) for name, parameter in named]
        self._replica = replica
        self._line = line
        with torch.no_grad(), compat.unseen():
            self._began = {name: bit_sum(parameter) for name, parameter in named}

    def looks_at(self, calls: Sequence[RootCall], collectives: Collectives) -> None:
        """See what an iteration has done."""
        line = self._replica.made_at or self._line
        is_averaged = self._replica.is_promised and self._replica.past is None and self._replica.has_averaged
        sends = collectives.are_in(call.index for call in calls) or collectives.are_between_calls
        self.reduced = Reduced(None, line, self._replica.size) if is_averaged and not sends else None

    def sums(self) -> tuple[list[str], list[torch.Tensor]] | None:
        """Names and bit sums of the weights, of their gradients and of their first values; None where none has a gradient."""
        alive = [(name, p) for name, ref in self._named if (p := ref()) is not None and p.grad is not None]
        if not alive:
            return None
        with torch.no_grad(), compat.unseen():
            weights = [bit_sum(p) for _, p in alive]
            gradients = [bit_sum(p.grad) for _, p in alive if p.grad is not None]
        names = [name for name, _ in alive]
        began = [self._began[name] for name in names]
        return names + [GRADIENT + n for n in names] + [BEGAN + n for n in names], [*weights, *gradients, *began]


def outside_wrapper(
    calls: Sequence[RootCall], replicas: Replicas, names_of: Callable[[Sequence[RootCall]], dict[int, str]]
) -> OutsideWrapper | None:
    """What an iteration has trained outside of its only kind of DDP model; None where it has nothing, or no gradients yet.

    `names_of` gives the names of the parameters of some calls' modules, by identity.
    """
    trained = [call for call in calls if call.modes.grad]
    around = (
        call.line
        for call in trained
        if any(isinstance(m, DistributedDataParallel) for m in compat.all_modules(call.module))
    )
    line = next(around, None)
    groups = {tuple(replica.ranks) for replica in replicas.known}
    if line is None or len(groups) != 1:
        return None
    inside = replicas.parameters()
    names = names_of(trained)
    named: dict[int, tuple[str, nn.Parameter]] = {}
    for call in trained:
        if _is_wrapped_otherwise(call.module):
            return None
        for parameter in compat.all_parameters(call.module):
            if id(parameter) not in inside and id(parameter) in names and _lies_here(parameter):
                named.setdefault(id(parameter), (names[id(parameter)], parameter))
    return OutsideWrapper(list(named.values()), replicas.known[0], line) if named else None


def _is_wrapped_otherwise(root: nn.Module) -> bool:
    """Whether it holds a wrapper that is no DDP (FSDP)."""
    return any(is_wrapper(m) and not isinstance(m, DistributedDataParallel) for m in compat.all_modules(root))


def _lies_here(parameter: nn.Parameter) -> bool:
    """Whether it has a gradient, and is no part of one that is spread over ranks."""
    return parameter.grad is not None and not parameter.grad.is_sparse and compat.local_part(parameter) is parameter
