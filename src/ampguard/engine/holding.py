"""One optimizer, and what its gradients are."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampguard import compat
from ampguard.engine.setup import parameters_of
from ampguard.errors import SetupError

SAMPLE = 64
"""Parameters whose gradients are glanced at, to see whether somebody has changed them."""

Fingerprint = tuple[list[int], list[int]]

_NO_GRADIENT = id(None)


class Holding:
    """Made once per optimizer. Nothing here reads a gradient's values."""

    def __init__(
        self,
        name: str,
        optimizer: Optimizer,
        flat: Sequence[Tensor],
        models_parameters: Sequence[Tensor],
        leaf_of: Callable[[Tensor], Tensor],
    ) -> None:
        self.name = name
        self._leaf_of = leaf_of
        self.optimizer = optimizer
        self.flat = list(flat)
        """Parameters that are buffers in whose memory the model's parameters lie."""
        keys = {compat.storage_key(p) for p in flat}
        self._inside_flat = [p for p in models_parameters if keys and compat.storage_key(p) in keys]
        self.micro_steps = 0
        """Calls of `amp.step` in the present accumulation window."""
        self.is_new = False
        """Whether `amp.backward` was called since the last of them."""
        self.leaves_out = False
        """Whether its gradients are gone because the run went back to an earlier state."""
        self.writes_own = False
        """Whether the loop has called `amp.unscale_` before there was any gradient: it writes its own, without a scale."""
        self.losses: list[Tensor] = []
        """Those whose gradients are here, detached: a bad one is the reason of every bad step that it has reached."""
        self.foreign_writes_told = False
        self.misses_more = False
        """Whether more parameters than ever before are without a gradient: a layer may have been replaced."""
        self._added: set[int] = set()
        """Parameters that the loop has added since gradients were cleared last, by identity."""
        self.refresh()

    def follow_groups(self) -> None:
        """The loop has changed the optimizer's parameter groups."""
        known = set(map(id, self.parameters))
        self.refresh()
        self._added |= {id(p) for p in self.parameters if id(p) not in known}

    def came_with_gradients(self) -> bool:
        """Whether gradients are held by parameters alone that were added since."""
        held = {id(p) for p in self.parameters if p.grad is not None}
        return bool(held) and held <= self._added

    def refresh(self) -> None:
        """The optimizer's parameter groups have changed."""
        self.parameters = parameters_of(self.optimizer)
        flat = {id(p) for p in self.flat}
        learning = [p for p in self.parameters if self._leaf_of(p).requires_grad or id(p) in flat]
        self._learning = frozenset(map(id, learning))
        every = -(-len(learning) // SAMPLE) or 1
        self._sample = learning[::-1][::every][::-1]  # with the last one: heads get replaced
        self._most_missing = 0
        self._leaves = [leaf for p in self._sample if (leaf := self._leaf_of(p)) is not p]
        leaves = [self._leaf_of(p) for p in self.parameters]
        first_of_each = {_place(p): p for p in reversed(leaves)}  # O2: `model.half()` converts the norms alone
        self._glimpsed = [*first_of_each.values(), *leaves[-1:]]
        self._placed = [_place(p) for p in self._glimpsed]

    def take_gradients(self, originals: Sequence[Tensor]) -> None:
        """Those of the parameters that these are copies of: PyTorch's copies have none."""
        for p, original in zip(self.parameters, originals, strict=True):
            p.grad = original.grad.clone() if original.grad is not None else None

    def refuse_moved(self, name_of: Callable[[Tensor], str]) -> None:
        """Raise SetupError where the model has gone to another device or type since it was last looked."""
        for weight, before in zip(self._glimpsed, self._placed, strict=True):
            if (weight.dtype, weight.device) != before:
                raise SetupError(
                    f"the model of `{self.name}` was moved or converted after Amp was made: `{name_of(weight)}` was "
                    f"{_shown(before)}, and is {_shown(_place(weight))}\n"
                    "  do    move the model first, make its optimizer and then Amp, whose precision= does the converting"
                )

    @property
    def held(self) -> int:
        """Micro-steps whose gradients are here: those that were counted, and the one that is open."""
        return self.micro_steps + self.is_new

    def count(self) -> None:
        """`amp.step` inside a window: the micro-step is complete."""
        self.micro_steps += 1
        self.is_new = False

    def has_other_parameters(self) -> bool:
        """Whether somebody has added to the optimizer's groups, taken from them, or replaced a parameter in them."""
        groups = self.optimizer.param_groups
        if sum(len(group["params"]) for group in groups) != len(self.parameters):
            return True
        now = itertools.chain.from_iterable(group["params"] for group in groups)
        return not all(map(operator.is_, now, self.parameters))

    def has_new_parameters(self) -> bool:
        """Whether the optimizer holds one that it did not hold when it was last looked."""
        known = set(map(id, self.parameters))
        return any(id(p) not in known for p in parameters_of(self.optimizer))

    def learns_others(self) -> bool:
        """Whether parameters that were frozen when it was last looked have gradients: then it is looked again."""
        before = self._learning
        if not self.has_gradients():
            return False
        self.refresh()
        return any(p.grad is not None for p in self.parameters if id(p) in self._learning - before)

    def awaits_average(self) -> bool:
        """Whether gradients are with the model's low weights, and not with what is updated: inside DDP's `no_sync()`."""
        return any(leaf.grad is not None for leaf in self._leaves)

    def fingerprint(self) -> Fingerprint:
        """Changes when a gradient is added to, written to, replaced or cleared (as far as the sample shows)."""
        gradients = [p.grad for p in (*self._sample, *self._leaves)]
        return list(map(id, gradients)), compat.versions_of([g for g in gradients if g is not None])

    def note_missing(self, seen: Fingerprint) -> None:
        """After a backward pass that has left this."""
        missing = seen[0].count(_NO_GRADIENT)
        if missing > self._most_missing:
            self._most_missing, self.misses_more = missing, True

    def glanced_at(self) -> list[tuple[Tensor, Tensor]]:
        """The leaf that autograd knows, and the parameter that gets its gradient; none of a flat buffer's."""
        flat = {id(p) for p in self.flat}
        return [(self._leaf_of(p), p) for p in self._sample if id(p) not in flat]

    def sample(self) -> Sequence[Tensor]:
        """The parameters whose gradients are glanced at."""
        return self._sample

    def sees_all(self) -> bool:
        """Whether the fingerprint is of all parameters."""
        return len(self._sample) == len(self._learning)

    def has_gradients(self) -> bool:
        return any(p.grad is not None for p in self._sample) or any(p.grad is not None for p in self.parameters)

    def has_nonzero_gradients(self) -> bool:
        """Whether any that is glanced at holds something else than zeros. Waits for the device."""
        gradients = [compat.local_part(p.grad) for p in self._sample if p.grad is not None]
        return any(g.layout != torch.strided or bool(g.any()) for g in gradients)

    def inputs(self) -> list[Tensor]:
        """The leaves that backward has to reach, for gradients of this optimizer only."""
        leaves = self._inside_flat or [self._leaf_of(p) for p in self.parameters]
        return [p for p in leaves if p.requires_grad]

    def flat_is_stale(self) -> bool:
        """Whether the model's gradients do not lie in the flat buffer's gradient."""
        keys = {compat.storage_key(p.grad) for p in self.flat if p.grad is not None}
        grads = [p.grad for p in self._inside_flat if p.grad is not None]
        return bool(self.flat) and (not grads or any(compat.storage_key(g) not in keys for g in grads))

    @torch.no_grad()
    def clear(self) -> None:
        """Gradients become None; those that share a buffer become 0 in place, or the buffer would lose them."""
        in_place = {id(p) for p in self.flat} | _sharing_memory(self.parameters)
        self.micro_steps, self.is_new, self.leaves_out, self.writes_own = 0, False, False, False
        self.losses = []
        self._added.clear()
        if not in_place:
            for p in self.parameters:
                p.grad = None
            return
        for p in self.parameters:
            if p.grad is None:
                continue
            if id(p) in in_place:
                if p.grad.grad_fn is None:
                    p.grad.requires_grad_(False)
                else:
                    p.grad.detach_()  # the graph of a double backward
                p.grad.zero_()
            else:
                p.grad = None


def _place(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
    return tensor.dtype, tensor.device


def _shown(place: tuple[torch.dtype, torch.device]) -> str:
    return f"{str(place[0]).removeprefix('torch.')} on {place[1]}"


def _sharing_memory(parameters: Sequence[Tensor]) -> set[int]:
    """The parameters whose gradients are parts of one buffer, by identity.

    Of two parts of a buffer at least one does not begin where it begins, which is quickly asked.
    """
    gradients = [gradient for p in parameters if (gradient := p.grad) is not None]
    try:
        if not any(map(Tensor.storage_offset, gradients)):
            return set()
    except RuntimeError:  # a sparse gradient has no storage
        pass
    parts = [p for p in parameters if p.grad is not None and _is_part(p.grad)]
    keys = [compat.storage_key(p.grad) for p in parts if p.grad is not None]
    return {id(p) for p, key in zip(parts, keys, strict=True) if keys.count(key) > 1}


def _is_part(gradient: Tensor) -> bool:
    if gradient.layout != torch.strided or type(gradient) is not Tensor:
        return False
    return gradient.untyped_storage().nbytes() > gradient.numel() * gradient.element_size()
