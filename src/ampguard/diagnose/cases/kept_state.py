"""What a script keeps from step to step: a queue of keys, a centre, running figures. Did an earlier failure spoil it?

Such a tensor hangs in no module. It was finite when a step failed, and what that step made of it goes into the next one:
which fails too, where it reads it, and has nothing else to tell. A batch is not kept, and is bad by itself. So it is
with buffers that the script writes: once it was told what has made the values bad, the calls that read them are no news.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.flags import is_immediate
from ampguard.capture.record import BadResult, Event, GlueOp, Held, RootCall, SavedBuffer
from ampguard.capture.recorder import FlightRecorder
from ampguard.capture.root_calls.trees import tensors_in
from ampguard.diagnose.cases.case import Case
from ampguard.diagnose.cases.withheld import WithheldStates, bound_in, is_part_of
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.givens.named_arguments import named_leaves
from ampguard.numerics import is_finite

MOST_EVENTS = 512
"""Of the events of a step that failed the latest, whose operands are looked at."""

LARGEST = 1 << 22
"""Elements up to which they are."""

Reading = tuple[str, int, Any, str]
"""Where a tensor is read: the file, the line, what was called, and by which argument."""


class KeptState:
    """Knows what a step that failed had read while it was finite."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self._case: Case | None = None
        self._finite: set[Reading] = set()
        self._written: list[tuple[weakref.ref[Tensor], Case]] = []
        self._bound: list[tuple[dict[str, Any], str, Case]] = []
        """Buffers and attributes that a call which failed has bound to what is bad: in which dictionary, and their names."""
        self.withheld = WithheldStates(recorder)

    def note_written(self, evidence: Evidence, case: Case) -> None:
        """A failure begins where the script had computed what it then wrote to buffers, or to plain attributes: these."""
        spoiled = {id(held.tensor) for held in evidence.bad.targets if isinstance(held, Held)}
        for root in evidence.bad.record.events:
            if not isinstance(root, RootCall):
                continue
            if root.is_rewritten:
                buffers = compat.named_buffers(root.module)
                self._written += [(weakref.ref(buffers[n]), case) for n in root.swapped_state if n in buffers]
            kept = [saved for saved in root.buffers if saved.is_plain]
            self._written += [(weakref.ref(s.tensor), case) for s in kept if id(s.tensor) in spoiled or _has_spoiled(s)]

    def note(self, bad: BadResult, case: Case) -> None:
        """A training step has failed, and that was told as `case`."""
        if bad.mode != "train" or bad.kind not in ("loss", "gradient") or case.incident.severity == "info":
            return
        self._case = case
        self._bound += [
            (owner, name, case) for owner, name, before in bound_in(bad) if _is_spoiled(owner, name, before)
        ]
        self._finite = {reading for reading, held in _read_in(bad.record.events) if is_finite(held.value.detach())}

    def explains(self, cause: str, bad: BadResult, evidence: Evidence) -> Case | None:
        """Of which failure that was told it is the doing that what was given is bad; it is counted to that then."""
        case: Case | None = None
        if cause in ("nonfinite-parameter", "nonfinite-input"):
            given = evidence.given_by_script
            case = next((case for ref, case in self._written if any(is_part_of(t, ref()) for t in given)), None)
            case = case or self.withheld.told_of(given, bad) or self._bound_by(given, bad)
        if case is None and cause == "nonfinite-input" and self._has_gone_bad(bad, evidence):
            case = self._case
        if case is not None:
            case.consequences += 1
            case.last_step = bad.step
        return case

    def _bound_by(self, given: list[Tensor], bad: BadResult) -> Case | None:
        """The failure whose call has bound what a later one was given, or what that was made from since."""
        for owner, name, before in bound_in(bad) if self._bound else ():
            if any(before is tensor for tensor in given):
                known = (case for place, key, case in self._bound if place is owner and key == name)
                return next(known, None)
        return None

    def _has_gone_bad(self, bad: BadResult, evidence: Evidence) -> bool:
        """Whether bad data were finite in the failing step right before, and are no batch."""
        case, given = self._case, evidence.given_tensor
        if case is None or given is None or bad.step > case.last_step + 1 or self.is_of_a_batch(given):
            return False
        return any(held.tensor is given and reading in self._finite for reading, held in _read_in(evidence.events()))

    def is_of_a_batch(self, given: Tensor | None) -> bool:
        """Whether it came from the script's loader."""
        batches = self._recorder.preprocessing.batch_before, self._recorder.preprocessing.last_batch
        live = [value for ref in _refs_in(batches) if (value := ref()) is not None]
        return any(tensor is given for value in live for tensor in tensors_in(value))


def _is_spoiled(owner: dict[str, Any], name: str, before: Any) -> bool:
    """Whether a name stands for another tensor than before a call, and for one that is not finite."""
    now = owner.get(name)
    if not isinstance(now, Tensor) or not isinstance(before, Tensor) or now is before:
        return False
    return is_finite(before.detach()) and not is_finite(now.detach())


def _has_spoiled(saved: SavedBuffer) -> bool:
    """Whether the call took it finite, and it is no longer so."""
    return saved.copy is not None and is_finite(saved.copy) and not is_finite(saved.tensor.detach())


def _refs_in(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _refs_in(value)
    elif isinstance(tree, weakref.ref):
        yield tree


def _read_in(events: list[Event]) -> Iterator[tuple[Reading, Held]]:
    """The floating tensors that events outside modules, and calls of them, were given and that no event had made."""
    for event in events[-MOST_EVENTS:]:
        if not isinstance(event, (GlueOp, RootCall)) or event.line is None:
            continue
        what = event.func if isinstance(event, GlueOp) else type(event.module)
        for name, held in named_leaves(event):
            if not isinstance(held, Held) or isinstance(held.tensor, nn.Parameter) or not held.is_intact:
                continue
            if held.tensor.is_floating_point() and held.tensor.numel() <= LARGEST and is_immediate(held.tensor):
                yield (event.line.code.co_filename, event.line.number, what, name), held
