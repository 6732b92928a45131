"""Forward-mode derivatives (`torch.func.jvp`, `jacfwd`, dual numbers): which operators compute the tangents, and of what.

PyTorch runs them right behind the operator that is differentiated, from the same line. Those that read a tangent are part
of a derivative, and so is what only those read: the factor 1 / sqrt(1 - x * x) of an arc cosine.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch import Tensor

from ampguard import compat
from ampguard.capture.events.operands import held_by, refs_of
from ampguard.capture.events.tangents import Mark, Tangents
from ampguard.capture.record import Event, GlueOp, Held, Line, Ref, StepRecord
from ampguard.capture.root_calls.trees import map_tensors
from ampguard.errors import ReplayError
from ampguard.replay.operators import flat_tensors
from ampguard.replay.trace import Trace
from ampguard.replay.variants import Intervention, RunKey


@dataclass(frozen=True, slots=True)
class Ran:
    """An operator: what it read and what it made, by any names."""

    number: int
    func: Any
    line: Line | None
    reads: Sequence[Hashable]
    makes: Sequence[Hashable]


def tangents_in(record: StepRecord, tangents: Tangents) -> dict[int, int | None]:
    """For the operators outside modules that compute with tangents: which event each of them differentiates, if that is
    known."""
    events = [event for event in record.events if isinstance(event, GlueOp)]
    marks = list(tangents.between(events[0].index, events[-1].index)) if events else []
    if not any(mark.is_made for mark in marks) and not any(compat.pairs_tangent(event.func) for event in events):
        return {}
    ran = [
        Ran(
            event.index,
            event.func,
            event.line,
            _reads(event),
            [Ref(event.index, position) for position in range(len(event.outputs))],
        )
        for event in events
    ]
    return derivatives_among(ran, [(mark.at, _name(mark), mark.is_made) for mark in marks])


class TracedTangents:
    """The dual numbers that are made within the modules of a replay."""

    def __init__(self) -> None:
        self._marks: list[tuple[int, Hashable, bool]] = []

    def note(self, at: int, maker: Hashable, is_made: bool) -> None:
        """What this operator made is a tangent from operator `at` on; or it was taken out of a dual number, and is none."""
        self._marks.append((at, maker, is_made))

    def tell(self, trace: Trace) -> None:
        """Say of each operator of the trace that computes a tangent what it differentiates."""
        if not self._marks and not any(compat.pairs_tangent(op.func) for op in trace.ops):
            return
        ran = [
            Ran(
                op.index,
                op.func,
                op.line,
                [operand.made_by or ("given", operand.storage) for operand in op.inputs],
                [(op.index, position) for position in range(len(op.outputs))],
            )
            for op in trace.ops
            if op.root is not None
        ]
        for index, of in derivatives_among(ran, self._marks).items():
            op = trace.ops[index]
            if not op.in_backward:
                op.in_backward = op.is_tangent = True
                op.forward = of


def differentiated_in(trace: Trace, events: Iterable[Event]) -> dict[RunKey, RunKey]:
    """For the operators of a trace that compute derivatives outside autograd: the one that each of them differentiates.

    They are tangents, and what transforms of `torch.func` have differentiated outside every module.
    """
    taped = {event.index for event in events if isinstance(event, GlueOp) and event.derivative is not None}
    ops = [op for op in trace.ops if op.forward is not None and (op.is_tangent or op.event in taped)]
    if not ops:
        return {}
    names = ChangedOperands()
    keys = [names.key(op.event, op.func) for op in trace.ops]
    return {keys[op.index]: keys[op.forward] for op in ops if op.forward is not None}


class ChangedOperands:
    """Operators that are given other operands on trial: what computes their derivatives is given the same."""

    def __init__(self, differentiated: Mapping[RunKey, RunKey] | None = None) -> None:
        self.differentiated = differentiated or {}
        """For operators that compute derivatives: the one that each of them differentiates."""
        self._with_derivatives = frozenset(self.differentiated.values())
        self._runs: Counter[tuple[int, str]] = Counter()
        self._instead: dict[RunKey, dict[int, Tensor] | None] = {}

    def key(self, event: int, func: Any) -> RunKey:
        """The name of an operator that is about to run."""
        name = str(func)
        self._runs[event, name] += 1
        return event, name, self._runs[event, name] - 1

    def noting(self, key: RunKey | None, func: Any, args: Any, kwargs: Any) -> Any:
        """`func`, which is about to be run with a change; where it is differentiated, what it is given is noted."""
        if key is None or key not in self._with_derivatives:
            return func
        self._instead[key] = None
        return _Noting(func, lambda *changed: self._note(key, flat_tensors(args, kwargs), flat_tensors(*changed)))

    def _note(self, key: RunKey, before: list[Tensor], changed: list[Tensor]) -> None:
        if len(before) == len(changed):
            pairs = zip(before, changed, strict=True)
            self._instead[key] = {id(old): new for old, new in pairs if new is not old}

    def changing(self, key: RunKey, args: Any, kwargs: Any, change: Intervention | None) -> Intervention | None:
        """`change`, and before it what gives an operator the operands that the one has been given which it differentiates.

        Raises ReplayError where those are not known: such a trial shows nothing.
        """
        of = self.differentiated.get(key)
        if of is None or of not in self._instead:
            return change
        instead = self._instead[of]
        if instead is None:
            raise ReplayError("the derivative is computed from the operand itself, outside autograd")
        if key in self._with_derivatives:
            self._instead[key] = instead  # of the second derivative
        places = {i: instead[id(t)] for i, t in enumerate(flat_tensors(args, kwargs)) if id(t) in instead}
        return _substituting(places, change) if places else change


def _substituting(places: Mapping[int, Tensor], change: Intervention | None) -> Intervention:
    """Gives an operator other tensors, by their number among its operands. They are differentiated as the ones they replace."""

    def substituted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        numbers = count()

        def other(tensor: Tensor) -> Tensor:
            new = places.get(next(numbers))
            if new is None:
                return tensor
            return new.detach() + (tensor - tensor.detach()) if tensor.requires_grad else new

        args, kwargs = map_tensors((args, kwargs), other)
        return change(func, args, kwargs) if change is not None else func(*args, **kwargs)

    return substituted


class _Noting:
    """An operator that tells what it is given."""

    def __init__(self, func: Any, tell: Callable[[Any, Any], None]) -> None:
        self._func = func
        self._tell = tell

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._tell(args, kwargs)
        return self._func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._func, name)

    def __str__(self) -> str:
        return str(self._func)


def _reads(event: GlueOp) -> list[Hashable]:
    if compat.pairs_tangent(event.func):
        return [_named(operand) for operand in event.args]  # in their order
    return [*refs_of(event), *(id(held.tensor) for held in held_by(event))]


def _named(operand: Any) -> Hashable:
    return id(operand.tensor) if isinstance(operand, Held) else operand


def _name(mark: Mark) -> Hashable:
    return mark.ref if mark.ref is not None else id(mark.tensor())


def derivatives_among(ran: Sequence[Ran], marks: Iterable[tuple[int, Hashable, bool]]) -> dict[int, int | None]:
    """The operators that compute tangents, by number, and the one that each of them differentiates.

    `marks`: from which operator on something is a tangent, or no longer, in order.
    """
    marks = list(marks)
    found = _marked(ran, marks) if marks else {}
    return found | _paired(ran)


def _paired(ran: Sequence[Ran]) -> dict[int, int | None]:
    """What tangents were computed by, as far as PyTorch shows which tensor each of them is given to (not under `vmap`)."""
    found: dict[int, int | None] = {}
    makers: dict[Hashable, Ran] = {}
    for op in ran:
        if compat.pairs_tangent(op.func) and len(op.reads) == 2:
            tangent, primal = (makers.get(name) for name in op.reads)
            waiting = [tangent] if tangent is not None and primal is not None else []
            while waiting:
                one = waiting.pop()
                if primal is None or one.number <= primal.number or found.get(one.number) == primal.number:
                    continue
                found[one.number] = primal.number
                waiting += [maker for name in one.reads if (maker := makers.get(name)) is not None]
        makers |= dict.fromkeys(op.makes, op)
    return found


def _marked(ran: Sequence[Ran], marks: Sequence[tuple[int, Hashable, bool]]) -> dict[int, int | None]:
    """The same by what is told of the tangents that go into `jvp` and come out of it."""
    of_tangents = _reading(ran, marks)
    used = {name for op in ran for name in op.reads} | {name for _, name, is_made in marks if not is_made}
    alive = [op for op in ran if not used.isdisjoint(op.makes)]  # batching leaves views behind that nobody reads
    inside = of_tangents | _factors(alive, of_tangents, {name for _, name, _ in marks})
    found: dict[int, int | None] = {op.number: None for op in ran if op.number in inside}
    last: Ran | None = None
    for op in alive:
        if op.number not in inside:
            last = op if op.reads else last
        elif last is not None and last.line == op.line:
            found[op.number] = last.number
    return found


def _reading(ran: Iterable[Ran], marks: Iterable[tuple[int, Hashable, bool]]) -> set[int]:
    """Those that read a tangent: what they make is one, too."""
    found: set[int] = set()
    tangents: set[Hashable] = set()
    coming = deque(marks)
    for op in ran:
        while coming and coming[0][0] <= op.number:
            _, name, is_made = coming.popleft()
            (tangents.add if is_made else tangents.discard)(name)
        if not tangents.isdisjoint(op.reads):
            found.add(op.number)
            tangents.update(op.makes)
    return found


def _factors(ran: Sequence[Ran], of_tangents: Container[int], meant: Container[Hashable]) -> set[int]:
    """Those whose results are read by such operators alone, on the same line.

    `meant`: what the script made tangents of dual numbers, or has taken out of them.
    """
    readers: dict[Hashable, list[Ran]] = {}
    for op in ran:
        for name in op.reads:
            readers.setdefault(name, []).append(op)
    found: set[int] = set()
    for op in reversed(ran):
        if op.number in of_tangents or any(name in meant for name in op.makes):
            continue
        all_readers = [reader for name in op.makes for reader in readers.get(name, ())]
        if all_readers and all(
            reader.line == op.line and (reader.number in of_tangents or reader.number in found)
            for reader in all_readers
        ):
            found.add(op.number)
    return found
