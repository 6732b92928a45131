"""What a script keeps from step to step: a queue of keys, a centre, running figures. Did an earlier failure spoil it?

Such a tensor hangs in no module. It was finite when a step failed, and what that step made of it goes into the next one:
which fails too, where it reads it, and has nothing else to tell. A batch is not kept, and is bad by itself. So it is
with buffers that the script writes: once it was told what has made the values bad, the calls that read them are no news.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.flags import is_immediate
from ampguard.capture.judging.carried import Place as CodeLine
from ampguard.capture.judging.carried import place_of as line_place
from ampguard.capture.record import BadResult, Event, GlueOp, Held, Ref, RootCall, SavedBuffer
from ampguard.capture.recorder import FlightRecorder
from ampguard.capture.root_calls.trees import tensors_in
from ampguard.diagnose.cases.case import Case, Place
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.givens.named_arguments import named_leaves
from ampguard.incident import Incident
from ampguard.numerics import is_finite

MOST_EVENTS = 512
"""Of the events of a step that failed the latest, whose operands are looked at."""

LARGEST = 1 << 22
"""Elements up to which they are."""

Reading = tuple[str, int, Any, str]
"""Where a tensor is read: the file, the line, what was called, and by which argument."""


MOST_WITHHELD = 4
"""Failures of state that are looked into without anything having read it."""


@dataclass
class Withheld:
    """State was spoiled, and why is known. It is told once something has read it: figures may well be NaN."""

    incident: Incident
    evidence: Evidence
    place: Place
    state: list[weakref.ref[Tensor]]
    lines: frozenset[CodeLine]
    """Those that have left it."""

    @classmethod
    def of(cls, incident: Incident, evidence: Evidence, place: Place) -> Withheld:
        made = _made(evidence.bad)
        lines = frozenset(line_place(event.line) for event, _ in made if event.line is not None)
        return cls(incident, evidence, place, [event.outputs[output] for event, output in made], lines)

    def told_of(self, bad: BadResult) -> Incident:
        """The incident, now that `bad` has read the state."""
        reader = f"in step {bad.step}" if bad.mode == "train" else "in evaluation"
        text = f"{self.incident.explanation} It is kept over the steps, and was finite before; what fails {reader} reads it."
        return msgspec.structs.replace(self.incident, explanation=text)


class KeptState:
    """Knows what a step that failed had read while it was finite."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self._case: Case | None = None
        self._finite: set[Reading] = set()
        self._written: list[tuple[weakref.ref[Tensor], Case]] = []
        self._withheld: list[Withheld] = []
        self._told: list[tuple[frozenset[CodeLine], Case]] = []
        """Of what was withheld and has been read, the lines that leave it."""
        self.looks = 0

    @property
    def may_look(self) -> bool:
        """Whether state that has gone bad may be looked into."""
        return self.looks < MOST_WITHHELD

    def withhold(self, withheld: Withheld) -> None:
        """State of the script's own was spoiled, of which nobody knows yet whether anything reads it."""
        self.looks += 1
        self._withheld = [
            known for known in self._withheld if known.place != withheld.place
        ]  # (it has recovered since)
        self._withheld.append(withheld)

    def was_made_of(self, given: Tensor | None, bad: BadResult) -> bool:
        """Whether state is bad because it was made from some that is withheld: that lies in other places then, too."""
        found = next((known for known in self._withheld if given is not None and self._holds(known, given)), None)
        if found is not None:
            made = _made(bad)
            found.lines |= {line_place(event.line) for event, _ in made if event.line is not None}
            found.state += [event.outputs[output] for event, output in made]
        return found is not None

    def take_read(self, cause: str, given: Tensor | None) -> Withheld | None:
        """What was withheld of a tensor that has been read now."""
        if cause not in ("nonfinite-parameter", "nonfinite-input") or given is None:
            return None
        return self._take(next((known for known in self._withheld if self._holds(known, given)), None))

    def take_at(self, place: Place) -> Withheld | None:
        """What was withheld of a place at which the failure of a later step begins."""
        return self._take(next((known for known in self._withheld if known.place == place), None))

    def _take(self, found: Withheld | None) -> Withheld | None:
        if found is not None:
            self._withheld.remove(found)
        return found

    def _holds(self, withheld: Withheld, tensor: Tensor) -> bool:
        """Whether it is about this tensor, or a part of it, or what the same lines have made of it since."""
        live = [state for ref in withheld.state if (state := ref()) is not None]
        return any(_is_part_of(tensor, state) for state in (*live, *self._recorder.carried.left_bad_by(withheld.lines)))

    def note_read(self, withheld: Withheld, case: Case) -> None:
        """It was told as `case`."""
        self._told.append((withheld.lines, case))
        self._written += [(ref, case) for ref in withheld.state]

    def note_written(self, evidence: Evidence, case: Case) -> None:
        """A failure begins where the script had computed what it then wrote to buffers, or to plain attributes: these."""
        spoiled = {id(held.tensor) for held in evidence.bad.targets if isinstance(held, Held)}
        for root in evidence.bad.record.events:
            if not isinstance(root, RootCall):
                continue
            if root.is_rewritten:
                buffers = dict(root.module.named_buffers())
                self._written += [(weakref.ref(buffers[n]), case) for n in root.swapped_state if n in buffers]
            kept = [saved for saved in root.buffers if saved.is_plain]
            self._written += [(weakref.ref(s.tensor), case) for s in kept if id(s.tensor) in spoiled or _has_spoiled(s)]

    def note(self, bad: BadResult, case: Case) -> None:
        """A training step has failed, and that was told as `case`."""
        if bad.mode != "train" or bad.kind not in ("loss", "gradient") or case.incident.severity == "info":
            return
        self._case = case
        self._finite = {reading for reading, held in _read_in(bad.record.events) if is_finite(held.value.detach())}

    def explains(self, cause: str, bad: BadResult, evidence: Evidence) -> Case | None:
        """Of which failure that was told it is the doing that what was given is bad; it is counted to that then."""
        case: Case | None = None
        if cause in ("nonfinite-parameter", "nonfinite-input"):
            given = evidence.given_by_script
            case = next((case for ref, case in self._written if _is_part_of(given, ref())), None)
            case = case or next((case for lines, case in self._told if self._is_left_by(lines, given)), None)
        if case is None and cause == "nonfinite-input" and self._has_gone_bad(bad, evidence):
            case = self._case
        if case is not None:
            case.consequences += 1
            case.last_step = bad.step
        return case

    def _is_left_by(self, lines: frozenset[CodeLine], given: Tensor | None) -> bool:
        return any(_is_part_of(given, tensor) for tensor in self._recorder.carried.left_bad_by(lines))

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


def _made(bad: BadResult) -> list[tuple[Event, int]]:
    """The events that have made what a bad result is about, and which of their results that is."""
    made = ((bad.record.event(t.event), t.output) for t in bad.targets if isinstance(t, Ref))
    return [(event, output) for event, output in made if event is not None and output < len(event.outputs)]


def _is_part_of(given: Tensor | None, known: Tensor | None) -> bool:
    if given is None or known is None:
        return False
    return given is known or compat.storage_key(given) == compat.storage_key(known) != 0


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
