"""Which event made which tensor.

Tensors are known by identity, held weakly, each with the version it had when its event returned: one that was written to
since by somebody who was not recorded is nobody's.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ampguard import compat
from ampguard.capture.record import GlueOp, Ref, RootCall
from ampguard.compat import plain_version, version_of

Known = tuple[weakref.ref[Tensor], Ref, int]


class Producers:
    """The results of recorded events. Runs in every healthy step, hence the plain loops."""

    def __init__(self) -> None:
        self.known: dict[int, Known] = {}
        """By the tensor's identity: the tensor, the event that made it, and its version then."""
        self.writers: dict[int, list[int]] = {}
        """For an event, the later ones that wrote to its result in place, through a view."""
        self.added: list[int] = []
        """Of `known`, what is not yet among those known by their memory."""
        self._by_memory: dict[int, set[int]] = {}
        self._found = 0
        """Tensors of events that were kept, when last counted (the rows of a whole data set are one event's)."""

    def define(self, tensor: Tensor, ref: Ref) -> weakref.ref[Tensor]:
        """An event made this tensor, to which a weak reference is returned."""
        weak, identity = weakref.ref(tensor), id(tensor)
        self.known[identity] = (weak, ref, -1 if tensor.is_inference() else plain_version(tensor))
        self.added.append(identity)
        return weak

    def put(self, tensor: Tensor, weak: weakref.ref[Tensor], ref: Ref, version: int) -> None:
        """The same, where a weak reference and the version are at hand."""
        identity = id(tensor)
        self.known[identity] = (weak, ref, version)
        self.added.append(identity)

    def of(self, tensor: Tensor, version: int) -> Ref | None:
        """The event that gave this very tensor object the value that it has (or had) at a version."""
        known = self.known.get(id(tensor))
        return None if known is None or known[0]() is not tensor or version != known[2] else known[1]

    def is_known_since(self, tensor: Tensor, version: int) -> bool:
        """Whether this very tensor object is known as it was later than at a version: an operator has written to it."""
        known = self.known.get(id(tensor))
        return known is not None and known[2] > version and known[0]() is tensor

    def maker_of(self, tensor: Tensor) -> int | None:
        """The event that has made this very tensor object, at whatever version; None where none has."""
        known = self.known.get(id(tensor))
        return known[1].event if known is not None and known[0]() is tensor else None

    def correct(self, tensor: Tensor, began: int) -> None:
        """What an event from `began` on has made counts its versions by itself (`.data`), and not with its base."""
        known = self.known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1].event >= began and known[2] != version_of(tensor):
            self.known[id(tensor)] = (known[0], known[1], version_of(tensor))

    def add_views(self, op: GlueOp, base: Tensor, output: Any) -> None:
        """A view shares its base's version counter, but only once PyTorch has returned it to the script."""
        version = version_of(base)
        for position, view in enumerate(output if isinstance(output, (tuple, list)) else (output,)):
            ref = weakref.ref(view)
            self.put(view, ref, Ref(op.index, position), version)
            op.outputs.append(ref)
            op.floating.append(view.is_floating_point())

    def rename(self, tensor: Tensor, ref: Ref) -> None:
        """What an event made goes on under another class: a new object, which shares the memory and its version."""
        self.put(tensor, weakref.ref(tensor), ref, version_of(tensor))

    def note_write(self, written: Tensor, op: GlueOp, version: int | None = None) -> None:
        """An operator wrote to a tensor: what shares its memory and was made by recorded events has a new value.

        `version`: the tensor's version before, where that is told later.

        PyTorch counts the new version after the operator returns, hence the + 1 (inference tensors count none). A tensor
        that no event made is copied for the replay, so what shares its memory is not followed but taken as it is when it is
        used.
        """
        now = version_of(written)
        version = now if version is None else version
        one = 0 if written.is_inference() else 1
        index = op.index
        memory = compat.storage_key(written) if op.args and isinstance(op.args[0], Ref) else 0
        for identity in self._lying_in(memory) if memory else ():
            alias, ref, known_version = self.known[identity]
            tensor = alias()
            if tensor is None or tensor is written or ref.event > index:
                continue  # (a write that is told later: a view that was made after it has seen the new value)
            if known_version == version_of(tensor) or (known_version == version and version_of(tensor) == now):
                self.known[identity] = (alias, ref, known_version + one)
                self.writers.setdefault(ref.event, []).append(index)
        self.put(written, weakref.ref(written), Ref(index, 0), version + one)

    def _lying_in(self, memory: int) -> list[int]:
        """The known tensors of some memory. The others are not looked at: a loop may write to one weight after the other."""
        if len(self.added) > len(self.known):
            self._by_memory.clear()
            self.added = list(self.known)
        for identity in self.added:
            known = self.known.get(identity)
            tensor = known[0]() if known is not None else None
            if tensor is not None:
                self._by_memory.setdefault(compat.storage_key(tensor), set()).add(identity)
        self.added = []
        found = []
        for identity in tuple(self._by_memory.get(memory, ())):
            known = self.known.get(identity)
            tensor = known[0]() if known is not None else None
            if tensor is not None and compat.storage_key(tensor) == memory:
                found.append(identity)
            else:  # a loop that fills a tensor row by row comes by here again and again
                self._by_memory[memory].discard(identity)
                if tensor is None:
                    self.known.pop(identity, None)
        return found

    def forget_all(self) -> None:
        """Nothing is known any more."""
        if self.known:
            self.known.clear()
        if self.writers:
            self.writers.clear()
        if self._by_memory:
            self._by_memory.clear()
        self.added = []

    def keep_only(self, roots: Iterable[RootCall], later: int | None) -> None:
        """Forget all but the results of these calls that are still in use, and of the events from `later` on."""
        known = self.known
        self.known = {
            id(tensor): known[id(tensor)]
            for root in roots
            for ref in root.outputs
            if (tensor := ref()) is not None and id(tensor) in known
        }
        if later is None:
            self.writers.clear()
        else:
            self.known |= {key: value for key, value in known.items() if value[1].event >= later}
            self.writers = {index: made for index, made in self.writers.items() if index >= later}
        self._index_anew()

    def forget(self, kept: set[int]) -> None:
        """Of other events than these nothing is asked any more."""
        if self.writers:
            self.writers = {k: v for k, v in self.writers.items() if k in kept}
        if len(self.known) > 2 * max(len(kept), self._found) + 32:
            self.keep_made_by(kept)
            self._found = len(self.known)
        elif len(self.added) > 2 * len(self.known) + 32:
            self._index_anew()

    def keep_made_by(self, kept: set[int]) -> None:
        """Forget the results of all other events."""
        self.known = {k: v for k, v in self.known.items() if v[1].event in kept}
        self._index_anew()

    def _index_anew(self) -> None:
        self._by_memory.clear()
        self.added = list(self.known)
