"""Buffers around a root call: their value from before it, and whether the call poisoned them.

BatchNorm's running statistics take in the very forward pass that fails, so a replay needs them as they were. Only
buffers that calls really change are copied; which those are, their version counters tell. Statistics that a module of the
user's keeps in plain attributes (`self.total += x.sum()`) are buffers that nobody has registered: what calls write to in place.
So is what they write to in objects beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ampguard import compat
from ampguard.capture.flags import FiniteFlag, is_immediate
from ampguard.capture.record import SavedBuffer
from ampguard.capture.root_calls.at_rest import Looks, RestingBuffers
from ampguard.capture.root_calls.attributes import is_pytorchs, tables_beside
from ampguard.capture.root_calls.bymodule import ByModule
from ampguard.compat import version_of
from ampguard.numerics import all_finite_on_cpu, has_same_bits, is_finite

FIRST_CALL_COPY = 1 << 16
"""Elements up to which a buffer is copied before it is known whether calls in this mode change it."""

RESCAN_CALLS = 256

MOST_PLAIN = 64
"""Plain attributes of a root module's parts that are looked at."""

CALLS_TO_BEGIN = 8
"""Calls behind a scan after which an attribute that is still None is looked at no more, nor what hangs beside the module and
was not written to, until the next scan."""

WIDE = (torch.float32, torch.float64)
RANGED = 1 << 22
"""Elements up to which the lowest value of a buffer is kept: a mask that is cast to another type later had it before."""


@dataclass(slots=True)
class _Watched:
    places: list[tuple[dict[str, Tensor | None], str, str]] = field(default_factory=list)
    plain: list[tuple[dict[str, Any], str, str]] = field(default_factory=list)
    """Attributes that are tensors, or None as yet; and tensors in objects beside the module."""
    apart: set[int] = field(default_factory=set)
    """Those objects' dictionaries, by identity."""
    own: set[int] = field(default_factory=set)
    """Those of the buffers of modules of the user's."""
    changing: set[tuple[int, str]] = field(default_factory=set)
    modes: set[bool] = field(default_factory=set)
    """In training or not: in which of them it was called. BatchNorm writes its statistics in training only."""
    calls: int = 0
    at_rest: RestingBuffers = field(default_factory=RestingBuffers)
    is_compared: bool = False
    """Whether what is at rest is compared around the running call."""
    is_lazy: bool = False
    """Some buffers have no values yet: those of a `LazyModule`, until its first call."""


class Poisoned(NamedTuple):
    """A buffer that a call has turned non-finite."""

    path: str
    tensor: Tensor
    is_own: bool
    """It is a matter of the script's own code."""


@dataclass(slots=True)
class Asked:
    """Of buffers on a device: a flag of all that a call has changed, and what to ask when they are not all finite."""

    flag: FiniteFlag
    versions: dict[int, int]
    """Of these buffers behind the call, by identity."""
    poisoned: Callable[[], list[Poisoned]]
    """Those that the call has poisoned."""


class BufferWatch:
    """Remembers, per root module, where its buffers hang and which of them its calls change."""

    def __init__(self, asks: bool = True) -> None:
        """`asks`: whether to look at what calls change, and at what buffers hold at first."""
        self._asks = asks
        self._watched: ByModule[_Watched] = ByModule()
        self._poisoned: set[tuple[int, str]] = set()
        self._asked: Asked | None = None
        self._looks = Looks()
        self._lowest: dict[tuple[str, torch.Size], Tensor] = {}

    def lowest_before(self, path: str, shape: torch.Size) -> float | None:
        """The lowest value that a buffer of this name and shape had in float32. Waits for the device."""
        known = (low for (name, size), low in self._lowest.items() if size == shape and f".{path}".endswith(f".{name}"))
        low = next(known, None)
        return float(low) if low is not None else None

    def before_call(self, module: nn.Module, training: bool, again: bool = False) -> list[SavedBuffer]:
        """The buffers of `module`, which is in `training` or not, as they are now, with copies of those that its calls change.

        `again`: find out anew which buffers it has.
        """
        watched = self._watched.get(module)
        if watched is None:
            watched = self._watched.put(module, _Watched())
        if again or watched.is_lazy or watched.calls % RESCAN_CALLS == 0:
            self._scan(module, watched)
        watched.is_compared = training and watched.at_rest.are_any and self._looks.begin()
        if watched.is_compared:
            watched.changing |= watched.at_rest.written_unseen()  # between two calls
            self._looks.end()
        first = training not in watched.modes
        watched.modes.add(training)
        watched.calls += 1
        saved, kept = [], []
        for owner, name, _ in watched.places:
            tensor = owner.get(name)
            if tensor is not None:
                saved.append(
                    SavedBuffer(owner, name, tensor, version_of(tensor), None, is_own=id(owner) in watched.own)
                )
                if (id(owner), name) in watched.changing or (first and tensor.numel() <= FIRST_CALL_COPY):
                    kept.append(saved[-1])
        if watched.plain and watched.calls % RESCAN_CALLS == CALLS_TO_BEGIN:
            watched.plain = [
                (owner, name, path)
                for owner, name, path in watched.plain
                if type(owner.get(name)) is Tensor
                and (id(owner) not in watched.apart or (id(owner), name) in watched.changing)
            ]
        for owner, name, _ in watched.plain:
            tensor = owner.get(name)
            if type(tensor) is Tensor and _may_be_statistics(tensor):
                saved.append(SavedBuffer(owner, name, tensor, version_of(tensor), None, is_plain=True, is_own=True))
                if (id(owner), name) in watched.changing or first:
                    kept.append(saved[-1])
        for buffer, copy in zip(kept, compat.clones_of([buffer.tensor for buffer in kept]), strict=True):
            buffer.copy = copy
        return saved

    def _scan(self, module: nn.Module, watched: _Watched) -> None:
        places = [
            (compat.buffers_of(owner), name, f"{path}.{name}" if path else name)
            for path, owner in compat.named_modules_of_user(module).values()
            for name in compat.buffers_of(owner)
        ]
        watched.places = [place for place in places if not is_lazy(place[0][place[1]])]
        watched.plain = [
            (vars(owner), name, f"{path}.{name}" if path else name)
            for path, owner in compat.named_modules_of_user(module).values()
            if not is_pytorchs(owner)
            for name, value in vars(owner).items()
            if (value is None or type(value) is Tensor) and not name.startswith("_")
        ][:MOST_PLAIN]
        apart = [
            (table, name, f"{path}.{name}")
            for table, path in tables_beside(module)
            for name, value in table.items()
            if type(value) is Tensor
        ]
        watched.apart = {id(table) for table, _, _ in apart}
        users = (owner for _, owner in compat.named_modules_of_user(module).values() if not is_pytorchs(owner))
        watched.own = {id(compat.buffers_of(owner)) for owner in users}
        watched.plain += apart[:MOST_PLAIN]
        watched.is_lazy = len(watched.places) < len(places)
        if self._asks:
            self._keep_lowest(watched)

    def _keep_lowest(self, watched: _Watched) -> None:
        for owner, name, path in watched.places:
            tensor = owner.get(name)
            if (
                tensor is None
                or tensor.dtype not in WIDE
                or not 0 < tensor.numel() <= RANGED
                or not compat.is_dense(tensor)
            ):
                continue  # (a mask is dense)
            if (path, tensor.shape) not in self._lowest and compat.has_values(tensor):
                with torch.no_grad(), compat.unseen():
                    self._lowest[path, tensor.shape] = compat.local_part(tensor.detach()).amin()

    def after_call(self, module: nn.Module, saved: list[SavedBuffer]) -> list[Poisoned]:
        """Note which buffers the call changed; return those that it turned non-finite, for the first time."""
        watched = self._watched.get(module)
        pairs = [
            (b, now) for b, now in self.changed_by(module, saved) if now.is_floating_point() and compat.has_values(now)
        ]
        if watched is None or not pairs:
            return []
        changed = [pair for pair in pairs if is_immediate(pair[1])]
        elsewhere = [pair for pair in pairs if not is_immediate(pair[1])]
        if elsewhere:
            self._ask_for(watched, elsewhere)
        if not changed or all_finite_on_cpu(now for _, now in changed):
            return []
        return self._poisoned_of(watched, changed)

    def changed_by(self, module: nn.Module, saved: list[SavedBuffer]) -> list[tuple[SavedBuffer, Tensor]]:
        """Note which buffers the call changed: they, and the tensors that stand in their places now."""
        watched = self._watched.get(module)
        if watched is None or not saved:
            return []
        if watched.is_compared:
            self._looks.begin_again()
            watched.changing |= watched.at_rest.written_unseen()
            self._looks.end()
        changed: list[tuple[SavedBuffer, Tensor]] = []
        for buffer in saved:
            now = buffer.owner.get(buffer.name)
            if buffer.is_plain and now is not buffer.tensor:
                buffer.copy = None  # bound anew: that is no buffer
                continue
            if now is None or (now is buffer.tensor and not _has_changed(now, buffer, watched)):
                if buffer.copy is not None:
                    if not buffer.is_plain:
                        watched.at_rest.keep(buffer)
                    buffer.copy = None  # unchanged: the live one serves
                continue
            if not buffer.is_plain:
                watched.at_rest.take(buffer)
            watched.changing.add((id(buffer.owner), buffer.name))
            changed.append((buffer, now))
        return changed

    def _ask_for(self, watched: _Watched, changed: list[tuple[SavedBuffer, Tensor]]) -> None:
        """Ask a device for buffers that a call has changed, and that were not told of before."""
        changed = [(buffer, now) for buffer, now in changed if (id(buffer.owner), buffer.name) not in self._poisoned]
        if changed and not compat.cuda_is_capturing():
            tensors = [now for _, now in changed]
            versions = {id(now): version for now, version in zip(tensors, compat.versions_of(tensors), strict=True)}
            flag = FiniteFlag(tensors)
            self._asked = Asked(flag, versions, lambda: self._poisoned_of(watched, changed))

    def take_asked(self) -> Asked | None:
        """What a device was asked for since the last call of this."""
        asked, self._asked = self._asked, None
        return asked

    def _poisoned_of(self, watched: _Watched, changed: list[tuple[SavedBuffer, Tensor]]) -> list[Poisoned]:
        """Those that a call has turned non-finite, for the first time. Waits for the device."""
        paths = {(id(owner), name): path for owner, name, path in (*watched.places, *watched.plain)}
        poisoned = []
        for buffer, now in changed:
            key = (id(buffer.owner), buffer.name)
            before = _before(buffer, now)
            if key in self._poisoned or before is None or is_finite(now):
                continue
            if is_finite(before):
                poisoned.append(Poisoned(paths.get(key, buffer.name), now, buffer.is_own))
            elif is_immediate(now):
                continue
            self._poisoned.add(key)  # (a device is not asked again for what begins as Inf)
        return poisoned


def _may_be_statistics(tensor: Tensor) -> bool:
    """Whether it may be numbers that a module gathers: not what it has computed with a gradient, nor a large cache."""
    is_gathered = tensor.is_floating_point() and not tensor.requires_grad and tensor.numel() <= FIRST_CALL_COPY
    return is_gathered and is_immediate(tensor) and compat.is_dense(tensor)


def _before(buffer: SavedBuffer, now: Tensor) -> Tensor | None:
    """The value that a buffer had before a call; None where it is gone."""
    if buffer.copy is not None or now is buffer.tensor:
        return buffer.copy
    return buffer.tensor if version_of(buffer.tensor) == buffer.version else None


def _has_changed(now: Tensor, buffer: SavedBuffer, watched: _Watched) -> bool:
    """BatchNorm's kernels write their running statistics without counting a version: compare values once, then know."""
    if version_of(now) != buffer.version or (id(buffer.owner), buffer.name) in watched.changing:
        return True
    return buffer.copy is not None and compat.has_values(now) and not has_same_bits(now.detach(), buffer.copy)
