"""float32 master copies of low-precision weights: the optimizer updates these, the model gets them rounded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ampguard import compat


class Pairs:
    """A model's weights and their masters, of one optimizer. Whoever has written to either is seen by their versions.

    Where both of a pair were written to, the model's weight is what counts.
    """

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.masters: list[Tensor] = []
        self._seen: tuple[list[int], list[int]] = ([], [])

    def add(self, weight: Tensor, master: Tensor) -> int:
        """Gives the number of the pair."""
        self.weights.append(weight)
        self.masters.append(master)
        return len(self.weights) - 1

    def note(self) -> None:
        """They agree now."""
        self._seen = compat.versions_of(self.weights), compat.versions_of(self.masters)

    def present(self, number: int) -> Tensor:
        """What a weight is in float32: its master, or what `follow_model` would make of it, which stays as it is here.

        An average may stand in the model for an evaluation only: the master keeps what it holds. Differentiable.
        """
        weight, master = self.weights[number], self.masters[number]
        return master if compat.version_of(weight) == self._seen[0][number] else _with_changes(master, weight)

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Round the masters into the model."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)
        self.note()

    @torch.no_grad()
    def follow_masters(self) -> None:
        """Where somebody has written to a master (SAM climbs, an average is put in its place), the model follows."""
        of_weights, of_masters = self._seen
        now = compat.versions_of(self.masters)
        if now == of_masters:
            return
        for number, (weight, master) in enumerate(zip(self.weights, self.masters, strict=True)):
            if now[number] != of_masters[number] and compat.version_of(weight) == of_weights[number]:
                weight.copy_(master)
                of_weights[number], of_masters[number] = compat.version_of(weight), now[number]

    @torch.no_grad()
    def follow_model(self) -> None:
        """Where somebody has written to the model (weights are loaded, clipped, begun anew), the masters take what differs."""
        of_weights, of_masters = self._seen
        now = compat.versions_of(self.weights)
        if now == of_weights:
            return
        for number, (weight, master) in enumerate(zip(self.weights, self.masters, strict=True)):
            if now[number] != of_weights[number]:
                master.copy_(_with_changes(master, weight))
                of_weights[number], of_masters[number] = now[number], compat.version_of(master)


def _with_changes(master: Tensor, weight: Tensor) -> Tensor:
    """A master with the values of its weight where these are not its own, rounded."""
    return torch.where(weight != master.to(weight.dtype), weight.to(master.dtype), master)


class Masters:
    """Made before the weights are cast, so that they hold what was rounded off.

    Gradients go to the master as they arrive, in float32, and are not kept in the low precision: `zero_grad` of the
    optimizer clears all there is. Those that DistributedDataParallel averages go there once they are averaged.
    """

    def __init__(self, optimizers: Sequence[Optimizer], to_cast: set[int]) -> None:
        self.averaged_by: list[DistributedDataParallel] = []
        self._of: dict[int, tuple[Pairs, int]] = {}
        self._model: dict[int, Tensor] = {}
        self._pairs: dict[int, Pairs] = {}
        for optimizer in optimizers:
            pairs = self._pairs[id(optimizer)] = Pairs()
            for group in optimizer.param_groups:
                group["params"] = [
                    self._master(optimizer, p, pairs) if id(p) in to_cast else p for p in group["params"]
                ]

    def _master(self, optimizer: Optimizer, weight: Tensor, pairs: Pairs) -> Tensor:
        master = nn.Parameter(weight.detach().clone().float(), requires_grad=weight.requires_grad)
        if weight in optimizer.state:
            optimizer.state[master] = optimizer.state.pop(weight)
        learns = weight.requires_grad
        weight.requires_grad_(True)  # a frozen one takes no hook, and may learn later
        weight.register_post_accumulate_grad_hook(_MoveTo(master, self))
        weight.requires_grad_(learns)
        self._of[id(weight)] = pairs, pairs.add(weight, master)
        self._model[id(master)] = weight
        return master

    def present(self, weight: Tensor) -> Tensor | None:
        """What a model's weight is in float32 (see `Pairs.present`); None where it has no master."""
        pairs, number = self._of.get(id(weight), (None, 0))
        return pairs.present(number) if pairs is not None else None

    def model_weight(self, master: Tensor) -> Tensor:
        """The model's weight of a master; the tensor itself where it is none."""
        return self._model.get(id(master), master)

    def copy_to_model(self, optimizer: Optimizer) -> None:
        """Round the masters of an optimizer into the model."""
        self._pairs[id(optimizer)].copy_to_model()

    def note(self) -> None:
        """Weights and masters agree now."""
        for pairs in self._pairs.values():
            pairs.note()

    def follow_model(self, optimizer: Optimizer | None = None) -> None:
        """`optimizer`: only its masters, which are about to be updated."""
        for key, pairs in self._pairs.items():
            if optimizer is None or key == id(optimizer):
                pairs.follow_model()

    def follow_masters(self) -> None:
        """Not between a forward pass and its backward pass, which has kept the model's weights."""
        for pairs in self._pairs.values():
            pairs.follow_masters()

    def average_by(self, wrappers: Iterable[DistributedDataParallel]) -> None:
        """These average gradients over ranks."""
        known, self.averaged_by = self.averaged_by, list(wrappers)
        for ddp in self.averaged_by:
            if not any(ddp is other for other in known):
                self._take_those_of_first_rank(ddp)

    @torch.no_grad()
    def _take_those_of_first_rank(self, ddp: DistributedDataParallel) -> None:
        """DDP has given all ranks the weights of the first one as it wrapped the model. All ranks take part."""
        own = {id(p) for p in compat.all_parameters(ddp)}
        first = torch.distributed.get_global_rank(ddp.process_group, 0)
        for weight, master in self._all():
            if id(weight) in own:
                torch.distributed.broadcast(master, src=first, group=ddp.process_group)
        self.note()

    def take_averaged(self) -> None:
        """A backward pass has ended: gradients that are averaged now go to their masters."""
        if self.averaged_by and all(ddp.require_backward_grad_sync for ddp in self.averaged_by):
            for weight, master in self._all():
                move_gradient(weight, master)

    def forget_unaveraged(self, optimizer: Optimizer) -> None:
        """Gradients from inside `no_sync()`, which wait in the low precision."""
        for weight in self._pairs[id(optimizer)].weights if self.averaged_by else ():
            weight.grad = None

    @torch.no_grad()
    def state(self) -> list[Tensor]:
        """All masters, in the order of the optimizers and their parameters, with what was written to the model since."""
        return [
            pairs.present(number).detach() for pairs in self._pairs.values() for number in range(len(pairs.masters))
        ]

    @torch.no_grad()
    def load(self, saved: Sequence[Tensor]) -> None:
        """And what they are rounded to, into the model: its own may have been saved before it followed them."""
        for (_, master), value in zip(self._all(), saved, strict=True):
            master.copy_(value)
        for pairs in self._pairs.values():
            pairs.copy_to_model()

    def _all(self) -> list[tuple[Tensor, Tensor]]:
        return [both for pairs in self._pairs.values() for both in zip(pairs.weights, pairs.masters, strict=True)]


class _MoveTo:
    """A hook of a low-precision weight: its gradient is added to the master's."""

    def __init__(self, master: Tensor, masters: Masters) -> None:
        self._master = master
        self._masters = masters

    def __call__(self, weight: Tensor) -> None:
        if not self._masters.averaged_by:
            move_gradient(weight, self._master)


def move_gradient(weight: Tensor, master: Tensor) -> None:
    """Add a weight's gradient to its master's, in float32."""
    grad, weight.grad = weight.grad, None
    if grad is None:
        return
    with torch.no_grad():
        grad = grad.float()
        master.grad = grad if master.grad is None else master.grad.add_(grad)
