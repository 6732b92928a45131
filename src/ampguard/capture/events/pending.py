"""What is kept of the running step in short: calls whose operands are yet to be named, and what came between them.

Most steps are forgotten before anybody asks for more. Operands are the script's own tensors, each with the version that it
had; what has such an operand is named in its turn (see `EventLog.settle`), and so are what is named already and only waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from ampguard.capture.glue.taped_calls import TapedCall, WritingCall
from ampguard.capture.record import BackwardCall, Event, Ref
from ampguard.compat import storage_key

Entry: TypeAlias = tuple[Event, Sequence[int], Sequence[int]]
"""An event, and the versions of its operands: those by position, those by name."""


class PendingEvents:
    """In order."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.last_write = -1
        """The last of them that has written to a tensor."""
        self.last_call = -1
        """The last of them whose operands are yet to be named."""
        self._made: dict[int, TapedCall] = {}
        """By the identity of its result, the call that made it or wrote to it last."""
        self._written: dict[int, int] = {}
        """By the memory that was written to, the last call that did."""

    def events(self) -> list[Event]:
        return [entry[0] for entry in self.entries]

    def add_call(self, call: TapedCall, versions: Sequence[int], more: Sequence[int], result: object) -> None:
        """A call that was kept as one; `versions` are those of its operands before it."""
        self.entries.append((call, versions, more))
        self.last_call = call.index
        self._made[id(result)] = call
        if type(call) is WritingCall:
            self.last_write = call.index
            self._written[storage_key(call.operands[0][0])] = call.index

    def add_backward(self, call: BackwardCall, versions: Sequence[int]) -> None:
        """A call of `backward`; `versions` are those of what it was given."""
        self.entries.append((call, versions, ()))
        self.last_call = call.index

    def maker_of(self, tensor: Tensor, version: int) -> TapedCall | None:
        """The call that has given a tensor the value that it has at this version, its present one."""
        call = self._made.get(id(tensor))
        if call is None or call.outputs[0]() is not tensor or call.made[0] != version:
            return None
        return None if self.is_written_since(tensor, call.index) else call

    def is_written_since(self, tensor: Tensor, index: int) -> bool:
        """Whether a later call than `index` has written to what a tensor shares its memory with (a weight's `.data`)."""
        return self.last_write > index and self._written.get(storage_key(tensor), -1) > index

    def has_made(self, tensor: Tensor) -> bool:
        """Whether one of these calls has made this tensor, or written to it."""
        call = self._made.get(id(tensor))
        return call is not None and call.outputs[0]() is tensor

    def forget_made(self, tensor: Tensor) -> None:
        """An operator that is named already has given this tensor its value since."""
        self._made.pop(id(tensor), None)

    def name_of(self, tensor: Tensor, version: int) -> Ref | None:
        """The same, as the record names it."""
        call = self.maker_of(tensor, version)
        return None if call is None else Ref(call.index, 0)

    def take(self) -> list[Entry]:
        """All of them, which are pending no more."""
        entries = self.entries
        self.entries, self._made, self._written, self.last_write, self.last_call = [], {}, {}, -1, -1
        return entries

    def clear(self) -> None:
        self.take()

    def drop_before(self, start: int) -> None:
        """Forget the events before `start`."""
        self.entries = [entry for entry in self.entries if entry[0].index >= start]
        self._made = {identity: call for identity, call in self._made.items() if call.index >= start}
