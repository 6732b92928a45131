"""Weights that the script itself writes between two steps: an average of them, a teacher, a projection. Are they bad now?

They may be used only much later, in an evaluation, when nobody knows any more what was written. So they are looked at when
the next step begins, as long as what is computed between two steps is taped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.flags import is_immediate
from ampguard.capture.record import GlueOp, Held, Ref, StepRecord
from ampguard.numerics import is_finite

MOST = 8
"""Of the weights that were written, so many are looked at, the last among them."""
LARGEST = 1 << 16
"""Elements up to which they are."""
MOST_VIEWS = 4
"""Of views of views of a weight that are followed to it."""

Writes = dict[int, tuple[weakref.ref[Tensor], int]]


class WrittenWeights:
    """What was written since the last step, by the parameter's identity: the parameter, and the first operator that did it."""

    def __init__(self) -> None:
        self.writes: Writes = {}
        self._bad: dict[int, weakref.ref[Tensor]] = {}
        """Those that are known to be bad: by identity."""
        self.roots: Callable[[], Iterable[Iterable[Tensor]]] = tuple
        """The parameters of each module that was called."""
        self._by_memory: dict[int, weakref.ref[Tensor]] = {}
        self._unknown = 0
        """Writes to memory of which it was not known whose it is."""

    def note(self, op: GlueOp, record: Callable[[], StepRecord]) -> None:
        """An operator is about to write to its first operand."""
        parameter: Tensor | None = parameter_behind(op, record)
        if parameter is None:
            parameter = self._in_memory_of(op)
        if parameter is not None and id(parameter) not in self.writes:
            self.writes[id(parameter)] = weakref.ref(parameter), op.index

    def _in_memory_of(self, op: GlueOp) -> Tensor | None:
        """The parameter whose memory the operator writes to as a whole: no operator has made its `.data` of it."""
        target = op.args[0] if op.args else None
        if not isinstance(target, Held) or target.tensor.requires_grad:
            return None
        memory = compat.storage_key(target.tensor)
        parameter = self._with_memory(memory)
        if parameter is None and memory:
            self._unknown += 1
            if not self._unknown & (self._unknown - 1):  # most are no parameter's, and models change seldom
                each = (p for parameters in self.roots() for p in parameters)
                self._by_memory = {compat.storage_key(p): weakref.ref(p) for p in each}
                parameter = self._with_memory(memory)
        is_whole = parameter is not None and parameter.shape == target.tensor.shape
        return parameter if is_whole else None

    def _with_memory(self, memory: int) -> Tensor | None:
        ref = self._by_memory.get(memory) if memory else None
        parameter = ref() if ref is not None else None
        return parameter if parameter is not None and compat.storage_key(parameter) == memory else None

    def note_call(self, written: Tensor, index: int) -> None:
        """A call has written to a tensor, or to its `.data`."""
        if isinstance(written, nn.Parameter) and id(written) not in self.writes:
            self.writes[id(written)] = weakref.ref(written), index

    def weights(self) -> list[Tensor]:
        """Those that were written and are still there."""
        return [parameter for ref, _ in self.writes.values() if (parameter := ref()) is not None]

    def take_bad(self, record: Callable[[], StepRecord]) -> Tensor | None:
        """A parameter that was finite before and is not any more; None where all that are looked at are finite."""
        writes, self.writes = list(self.writes.values()), {}
        chosen = sorted({round(i * (len(writes) - 1) / (MOST - 1)) for i in range(MOST)}, reverse=True)
        step: StepRecord | None = None
        for ref, index in (writes[i] for i in chosen):
            parameter = ref()
            if parameter is None or parameter.numel() > LARGEST or not is_immediate(parameter):
                continue
            if is_finite(parameter.detach()):
                self._bad.pop(id(parameter), None)
            elif id(parameter) not in self._bad or self._bad[id(parameter)]() is not parameter:
                self._bad[id(parameter)] = ref
                step = record() if step is None else step
                if _was_finite(parameter, step, index):
                    return parameter
        return None


def parameter_behind(op: GlueOp, record: Callable[[], StepRecord]) -> nn.Parameter | None:
    """The parameter that an operator writes to, also through its `.data`, `.detach()` or a part of it."""
    target = op.args[0] if op.args else None
    if isinstance(target, Held):
        return target.tensor if isinstance(target.tensor, nn.Parameter) else None
    if not isinstance(target, Ref):
        return None
    step = record()
    event, held = step.event(target.event), _viewed(target, step)
    written = event.outputs[target.output]() if event is not None else None
    if held is None or written is None or not isinstance(held.tensor, nn.Parameter):
        return None
    return held.tensor if compat.storage_key(held.tensor) == compat.storage_key(written) != 0 else None


def _viewed(operand: Ref, record: StepRecord) -> Held | None:
    """What a result was made from, operator by operator, by their first operands, if the last of these is a given tensor."""
    first: object = operand
    for _ in range(MOST_VIEWS):
        event = record.event(first.event) if isinstance(first, Ref) else None
        if not isinstance(event, GlueOp) or not event.args:
            break
        first = event.args[0]
    return first if isinstance(first, Held) else None


def _was_finite(parameter: Tensor, record: StepRecord, index: int) -> bool:
    """Whether it was finite before that operator wrote to it, and is of the same type still (`.half()` may have made Inf)."""
    event = record.event(index)
    held = event.args[0] if event is not None and event.args else None
    if isinstance(held, Ref):  # its `.data`
        held = _viewed(held, record)
    if not isinstance(held, Held):
        return False
    value = held.copy
    return value is not None and value.dtype == parameter.dtype and is_finite(value)
