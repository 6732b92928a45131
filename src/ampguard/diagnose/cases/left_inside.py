"""What a call of an evaluation that failed has left in what it was given: keys and values in a cache, a state in a dictionary.

The next call reads them and fails too (a generation, token by token), and has nothing else to tell. No event made such a
tensor, and the record of the call that did holds what it was given before. But an operator of its replay made one that is
bad in exactly the same elements. A batch of a loader, and a tensor that is an argument itself, were left by nobody.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

from ampguard.capture.record import BadResult, Held, RootCall
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

    def note(self, evidence: Evidence, bad: BadResult, case: Case) -> None:
        """A failure was told as `case`."""
        if bad.mode != "eval" or bad.kind != "output" or case.incident.severity != "error":
            return
        if bad.step != self._step:
            self._step, self._made = bad.step, {}
        self._made |= dict.fromkeys(_made_in(evidence), case)

    def explains(self, cause: str, bad: BadResult, evidence: Evidence) -> Case | None:
        """The case that has left what this failure was given."""
        given = evidence.given
        if cause != "nonfinite-input" or given is None or (bad.mode, bad.step) != ("eval", self._step):
            return None
        if given.tensor.bad is None or not _lies_in_a_container(evidence):
            return None
        case = self._made.get(_print_of(given.tensor))
        if case is not None:
            self.note(evidence, bad, case)
        return case


def _lies_in_a_container(evidence: Evidence) -> bool:
    """Whether a call was given it in a dictionary, a list or an object: what may be filled from inside."""
    given = evidence.given_tensor
    leaves = (leaf for event in evidence.events() if isinstance(event, RootCall) for leaf in named_leaves(event))
    names = {name for name, held in leaves if isinstance(held, Held) and held.tensor is given}
    return bool(names) and not any(name.isidentifier() or name.startswith(("args[", "kwargs[")) for name in names)


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
