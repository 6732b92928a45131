"""Other tensors in the place of a model's weights, for a time: in its modules' own tables of parameters and buffers.

The parameters themselves stay as they are, and with them all that hangs on them: hooks, gradients, and the nodes by
which DistributedDataParallel learns that a gradient is there, which PyTorch makes anew (without the hook) for a parameter
whose `.data` gets another type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.engine.casting import is_castable
from ampguard.engine.force_fp32.modules import is_forced
from ampguard.numerics import is_finite


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter or buffer, under the name in its module's own table.

    `in_float32`: a module around it runs so. `gets_sparse`: its module gives it sparse gradients. `is_weight`: it stands where
    parameters do, whatever is there for this call (`torch.func.functional_call`).
    """

    entries: dict[str, Any]
    name: str
    tensor: Tensor
    in_float32: bool
    gets_sparse: bool = False
    is_weight: bool = True


def places_in(root: nn.Module, forced: frozenset[int] = frozenset()) -> Iterator[Place]:
    """Every place of a tensor that training precisions concern; a tied weight has several, one in TorchScript has none.

    `forced`: further modules that run in float32, by identity.
    """
    yield from _walk(root, forced, False, set())


def _walk(module: nn.Module, forced: frozenset[int], in_float32: bool, seen: set[int]) -> Iterator[Place]:
    if id(module) in seen:
        return
    seen.add(id(module))
    in_float32 = in_float32 or id(module) in forced or is_forced(module)
    for entries, is_weight in ((compat.parameters_of(module), True), (compat.buffers_of(module), False)):
        for name, tensor in entries.items():
            if tensor is not None and is_castable(tensor):
                gets_sparse = getattr(module, "sparse", False) is True
                yield Place(entries, name, tensor, in_float32, gets_sparse, is_weight)
    for child in compat.children_of(module).values():
        if child is not None:
            yield from _walk(child, forced, in_float32, seen)


_Before = tuple[int, Tensor | None]


@torch.no_grad()
def _before(place: Place, stand_in: Tensor) -> _Before:
    """A stand-in's version, and for what may be statistics its values: BatchNorm's kernels write without counting a version."""
    may_be_statistics = not place.is_weight and place.tensor.dim() == 1
    return compat.version_of(stand_in), stand_in.clone() if may_be_statistics else None


def _take_over(own: Tensor, stand_in: Tensor, version: int, values: Tensor | None) -> None:
    """What was written to a stand-in; elsewhere the model's own keeps what its stand-in cannot hold."""
    if compat.version_of(stand_in) != version:
        own.copy_(stand_in)
    elif values is not None:  # compared where they lie: nobody waits for a device
        own.copy_(torch.where(stand_in != values, stand_in.to(own.dtype), own))


def _is_lost_in(buffer: Tensor, stand_in: Tensor, version: int, values: Tensor | None) -> bool:
    """Whether a float16 buffer could not take over what was written to its wider stand-in."""
    if buffer.dtype.itemsize >= stand_in.dtype.itemsize or is_finite(buffer) or not is_finite(stand_in):
        return False
    return compat.version_of(stand_in) != version or (values is not None and not torch.equal(stand_in, values))


@dataclass(frozen=True, slots=True)
class _Entered:
    """What one `enter` has replaced: places with what stands there now, and the lists of recurrent modules' weights."""

    replaced: list[tuple[Place, Tensor, _Before]]
    flat: Sequence[tuple[nn.Module, dict[str, Any]]]


class StandIns:
    """What stands in some places of a model between `enter` and `leave`, as often as wanted.

    Inside of each other too: a compiler differentiates while it traces a call. The outermost `leave` puts back.
    """

    def __init__(
        self,
        root: nn.Module,
        standing_in: Iterable[tuple[Place, Tensor]],
        beside: Callable[[], Callable[[], None]] | None = None,
        *,
        follows_weights: bool = False,
    ) -> None:
        """`beside`: what is done too when they are put there; it gives what undoes it.

        `follows_weights`: parameters too take over what was written to their stand-ins, not buffers alone.
        """
        self._standing_in = list(standing_in)
        self._beside = beside
        self._follows_weights = follows_weights
        self._undo: list[Callable[[], None]] = []
        self._recurrent = [module for module in compat.all_modules(root) if isinstance(module, nn.RNNBase)]
        self._entered: list[_Entered] = []

    def enter(self) -> None:
        """Put them there, where the model's own tensors are."""
        flat = [(module, compat.flat_weights_of(module)) for module in self._recurrent]
        replaced = [
            (place, stand_in, _before(place, stand_in))
            for place, stand_in in self._standing_in
            if place.entries.get(place.name) is place.tensor
        ]
        for place, stand_in, _ in replaced:
            place.entries[place.name] = stand_in
        self._entered.append(_Entered(replaced, flat))
        compat.StandingIn.sets += 1
        if self._beside is not None:
            self._undo.append(self._beside())

    @torch.no_grad()
    def leave(self) -> None:
        """Put the model's own back, and into them what was written to buffers meanwhile (and to weights: `follows_weights`)."""
        if self._undo:
            self._undo.pop()()
        entered = self._entered.pop()
        compat.StandingIn.sets -= 1
        for place, stand_in, before in entered.replaced:
            now = place.entries.get(place.name)
            if now is stand_in:
                place.entries[place.name] = place.tensor
                if not place.is_weight or self._follows_weights:
                    _take_over(place.tensor, stand_in, *before)
                if not place.is_weight and _is_lost_in(place.tensor, stand_in, *before):
                    place.entries[place.name] = stand_in
            elif isinstance(now, Tensor) and now.dtype == stand_in.dtype:  # `self.buffer = new`
                if self._follows_weights and place.is_weight and now.shape == stand_in.shape:
                    place.entries[place.name] = place.tensor.copy_(now)
                else:
                    place.entries[place.name] = now.to(place.tensor.dtype)
        for module, flat in entered.flat:
            vars(module).update(flat)
