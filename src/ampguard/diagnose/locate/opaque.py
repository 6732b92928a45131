"""Bad values in memory that no operator wrote to: a kernel did (Triton, a C++ or CUDA extension), or another library (NumPy).

Autograd and the dispatcher show nothing of such a writer. What is known are the memory, the line that asked for it, the
module that was running, and, by computing the step in another precision, what the writer gives there.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ampguard.capture.record import BadResult
from ampguard.diagnose.attempts import attempt
from ampguard.diagnose.evidence import Evidence, result_of
from ampguard.diagnose.locate.chain import Chain, Link
from ampguard.numerics import NEG_INF
from ampguard.replay.operators import facts_of
from ampguard.replay.outcome import Outcome
from ampguard.replay.rebuild import Replayer
from ampguard.replay.trace import BadElements, Trace, TracedOp, TracedTensor
from ampguard.replay.variants import Captured, Variant

FILLERS = (0.5, 2.0)
"""What memory is filled with to see whether anybody else does."""


class OpaqueEvidence(Evidence):
    """What is known about a writer of memory; `op` is the operator that asked for it."""

    phase = "opaque"
    called = "a kernel that no operator shows"

    def __init__(self, bad: BadResult, chain: Chain, outcome: Outcome, replayer: Replayer | None) -> None:
        given = chain.given
        assert given is not None
        assert given.memory is not None
        memory, result = given.memory
        made = memory.outputs[result]
        outputs = list(memory.outputs)
        outputs[result] = replace(made, bad=_placed(given.tensor, made))
        flat = given.flat if made.shape == given.tensor.shape else None
        links = [*chain.links, Link(replace(memory, outputs=outputs), result, flat, given.kind)]
        super().__init__(bad, Chain(links), outcome, replayer)

    @property
    def remark(self) -> str:
        line = self.op.line
        where = line.location() if line is not None else None
        if where is None:
            return ""
        return (
            f" It wrote to memory that {where.file.rpartition('/')[2]}:{where.line} asks for; Triton, a C++ or CUDA extension "
            f"and NumPy do that unseen."
        )

    @cached_property
    def is_unwritten(self) -> bool:
        """Whether nobody wrote there at all: the memory holds whatever it is filled with beforehand."""
        if not facts_of(self.op.func).is_uninitialised or self.replayer is None or self.flat is None:
            return False
        return all(self._filled_with(number) == number for number in FILLERS)

    def _filled_with(self, number: float) -> float | None:
        """The element in the end, where the memory holds this number at first."""

        def filled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return func(*args, **kwargs).fill_(number)

        assert self.replayer is not None
        variant = Variant(at_places={self.op.place: filled}, capture=frozenset({self.op.index}))
        call = self.replayer.run(variant, traced=False).captured.get(self.op.index)
        return self.element(result_of(call.output, self.link.result)) if call is not None else None

    def recomputed(self, dtype: torch.dtype) -> Tensor | None:
        """What is written in a step that is computed in `dtype`."""
        return self._written.get(dtype) if dtype in self._written else self._write(dtype)

    @cached_property
    def _written(self) -> dict[torch.dtype, Tensor | None]:
        return {}

    def _write(self, dtype: torch.dtype) -> Tensor | None:
        call = self._call_in(dtype)
        result = result_of(call.output, self.link.result) if call is not None else None
        found = result.detach() if isinstance(result, Tensor) else None
        self._written[dtype] = found
        return found

    def _call_in(self, dtype: torch.dtype) -> Captured | None:
        """The operator that asks for the memory in such a step; its result is what was written there in the end."""
        if self.replayer is None:
            return None
        variant = self.all_in_float32 if dtype == torch.float32 else Variant(convert=dtype)
        try:
            seen = self.step_in_float32 if dtype == torch.float32 else attempt(self.bad, self.replayer, variant, True)
            twin = self._twin(seen.trace) if seen is not None else None
            if twin is None:
                return None
            again = self.replayer.run(Variant(convert=dtype, capture=frozenset({twin.index})), traced=False)
        except RuntimeError:  # written for one type alone
            return None
        return again.captured.get(twin.index)

    def _twin(self, trace: Trace) -> TracedOp | None:
        """The same operator in a step that is computed in another type. Of casts, which have no key, the one of this line."""
        if self.op.key:
            return trace.aligned(self.op)
        here = [op.index for op in self.trace.ops if (op.event, op.place) == (self.op.event, self.op.place)]
        there = [op for op in trace.ops if (op.event, op.place) == (self.op.event, self.op.place)]
        return there[here.index(self.op.index)] if len(here) == len(there) else None

    @cached_property
    def call_in_float32_step(self) -> Captured | None:
        return self._call_in(torch.float32)

    def widest(self) -> float | None:
        """What the element is in float64, where float32 does not hold it."""
        value = self.element(self.in_float64)
        is_beyond = value is not None and torch.finfo(torch.float32).max < abs(value) < float("inf")
        return value if is_beyond else None


def opaque_evidence(bad: BadResult, chain: Chain, outcome: Outcome, replayer: Replayer | None) -> OpaqueEvidence | None:
    """The evidence of such a writer, where the chain ends at its memory.

    None for a -Inf that it writes in float32 as well: that may be a mask, which the code means to have.
    """
    given = chain.given
    if given is None or given.memory is None or given.memory[0].in_backward:
        return None  # (see `OpaqueGradient`)
    evidence = OpaqueEvidence(bad, chain, outcome, replayer)
    if given.kind == NEG_INF and (replayer is None or not evidence.is_finite_in_float32):
        return None
    return evidence


def _placed(seen: TracedTensor, made: TracedTensor) -> BadElements | None:
    """The bad elements of a tensor as those of the whole memory that it lies in, where the two are alike."""
    bad = seen.bad
    if bad is None or seen.shape == made.shape:
        return bad
    return BadElements(bad.offsets, bad.offsets, bad.kinds, bad.count)
