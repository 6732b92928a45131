"""What a call of an evaluation that failed has left in what it was given: keys and values in a cache, a state in a dictionary.

The next call reads them and fails too (a generation, token by token), and has nothing else to tell. No event made such a
tensor, and the record of the call that did holds what it was given before. But an operator of its replay made one that is
bad in exactly the same elements. A batch of a loader, and a tensor that is an argument itself, were left by nobody.

A call that is counted to one that was told is not run again. What stood in its caches when it began stands there no more
where it has put something else in its place.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Iterator

from torch import Tensor

from ampguard.capture.record import BadResult, Held, Ref, RootCall
from ampguard.diagnose.cases.case import Case
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.givens.named_arguments import named_leaves
from ampguard.replay.trace import TracedTensor

MOST = 4096
"""Operators of a replay, the latest, and elements of a tensor that are compared."""

Print = tuple[int, str, int, bytes]
"""Size and type of a tensor, how many of its elements are bad, and which and of which kind. (Not its shape: of a view it is
another one.)"""


class LeftInside:
    """Knows which bad tensors were made inside the calls of the running evaluation that failed."""

    def __init__(self) -> None:
        self._step = -1
        self._made: dict[Print, Case] = {}
        self._unseen: dict[str, tuple[weakref.ref[Tensor], Case]] = {}
        """What calls that failed and were not run again were given in containers, by its name in there."""

    def note(self, evidence: Evidence, bad: BadResult, case: Case) -> None:
        """A failure was told as `case`."""
        if bad.mode != "eval" or bad.kind != "output" or case.incident.severity != "error":
            return
        self._begin(bad)
        self._made |= dict.fromkeys(_made_in(evidence), case)

    def note_unseen(self, bad: BadResult, case: Case) -> None:
        """A failure was counted to `case`."""
        if bad.mode != "eval" or bad.kind != "output" or case.incident.severity != "error":
            return
        self._begin(bad)
        events = (bad.record.event(target.event) for target in bad.targets if isinstance(target, Ref))
        for root in (event for event in events if isinstance(event, RootCall)):
            for name, leaf in named_leaves(root):
                if isinstance(leaf, Held) and not _is_argument(name):
                    self._unseen[name] = weakref.ref(leaf.tensor), case

    def _begin(self, bad: BadResult) -> None:
        if bad.step != self._step:
            self._step, self._made, self._unseen = bad.step, {}, {}

    def explains(self, cause: str, bad: BadResult, evidence: Evidence) -> Case | None:
        """The case that has left what this failure was given."""
        given = evidence.given
        if cause != "nonfinite-input" or given is None or (bad.mode, bad.step) != ("eval", self._step):
            return None
        names = _names_in_containers(evidence) if given.tensor.bad is not None else set()
        if not names:
            return None
        case = self._made.get(_print_of(given.tensor)) or self._put_there_unseen(names, evidence.given_tensor)
        if case is not None:
            self.note(evidence, bad, case)
        return case

    def _put_there_unseen(self, names: set[str], given: Tensor | None) -> Case | None:
        """The case to which a call was counted that was given another tensor in the place of this one."""
        found = (self._unseen.get(name) for name in names)
        return next((before[1] for before in found if before is not None and before[0]() is not given), None)


def _names_in_containers(evidence: Evidence) -> set[str]:
    """By which a call was given it in a dictionary, a list or an object: what may be filled from inside."""
    given = evidence.given_tensor
    leaves = (leaf for event in evidence.events() if isinstance(event, RootCall) for leaf in named_leaves(event))
    names = {name for name, held in leaves if isinstance(held, Held) and held.tensor is given}
    return set() if any(map(_is_argument, names)) else names


def _is_argument(name: str) -> bool:
    return name.isidentifier() or name.startswith(("args[", "kwargs["))


def _made_in(evidence: Evidence) -> Iterator[Print]:
    for op in evidence.outcome.trace.ops[-MOST:]:
        if op.root is not None:
            yield from (_print_of(tensor) for tensor in (*op.inputs, *op.outputs) if tensor.bad is not None)


def _print_of(tensor: TracedTensor) -> Print:
    assert tensor.bad is not None
    places = hashlib.blake2b(digest_size=16)
    for values in (tensor.bad.flat, tensor.bad.kinds):
        places.update(values[:MOST].contiguous().cpu().numpy().tobytes())
    return math.prod(tensor.shape), str(tensor.dtype), tensor.bad.count, places.digest()
