"""Evidence about bad gradients: where in the backward pass they begin, and what a smaller loss scale gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

from torch import Tensor

from ampguard import numerics
from ampguard.capture.record import BadResult
from ampguard.diagnose.compiled.fault import fault_of_compiled_code
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.locate import script_graph
from ampguard.diagnose.locate.chain import Chain, Link
from ampguard.diagnose.locate.opaque import OpaqueEvidence
from ampguard.diagnose.locate.slicing import Visited, chain_from
from ampguard.diagnose.protocol.owners import tensor_called
from ampguard.errors import DoesNotRepeatError, ReplayError
from ampguard.replay.outcome import Outcome
from ampguard.replay.rebuild import Replayer
from ampguard.replay.trace import TracedOp, bad_elements, traced
from ampguard.replay.variants import Variant

TARGETS = 8
"""Bad gradients whose chains are followed, spread over the parameters."""

NAMES = 12
"""Names of parameters in a report, of each kind."""


class GradientEvidence(Evidence):
    """What is known about the operator of the backward pass (or the hidden value) where bad gradients begin.

    Fixes are tried at a loss scale of 1 where the gradients are bad at that scale too: what is left is their doing.
    """

    phase = "backward"

    def __init__(self, bad: BadResult, chain: Chain, outcome: Outcome, replayer: Replayer | None) -> None:
        super().__init__(bad, chain, outcome, replayer)
        self.at_unit_scale: Outcome | None = None

    # --- the loss scale -----------------------------------------------------------------------------------------------

    @property
    def is_only_the_scale(self) -> bool:
        """Whether the gradients are finite once the loss is not scaled.

        Without a replay (the step was traced as it ran) the operator's own number tells.
        """
        if self.at_unit_scale is not None:
            return not self.at_unit_scale.is_bad
        scale, precision = self.bad.loss_scale, self.precision
        if self.replayer is not None or scale is None or precision is None or self.is_hidden:
            return False
        wide = self.largest_in_float32
        return wide is not None and wide / scale <= numerics.largest(precision)

    @cached_property
    def finite_scale(self) -> float | None:
        """The largest power of two below the loss scale at which the gradients are finite."""
        if self.replayer is None or not self.is_only_the_scale or self.bad.loss_scale is None:
            return None
        replayer, used = self.replayer, self.bad.loss_scale
        return largest_finite_scale(
            used, lambda scale: not replayer.run(Variant(loss_scale_factor=scale / used), traced=False).is_bad
        )

    @cached_property
    def largest_gradient(self) -> float | None:
        """The largest finite gradient at a loss scale of 1."""
        if self.at_unit_scale is None:
            return None
        peaks = [float(t.detach().abs().max()) for _, t in self.at_unit_scale.targets if t.numel()]
        return max((p for p in peaks if math.isfinite(p)), default=None)

    # --- where --------------------------------------------------------------------------------------------------------

    @property
    def is_hidden(self) -> bool:
        """Whether it begins with a value of the forward pass that the loss never sees."""
        return not self.op.in_backward

    @property
    def first_gradient(self) -> Link:
        """The first operator of the backward pass on the chain."""
        return next((link for link in reversed(self.chain.links) if link.op.in_backward), self.link)

    @property
    def differentiated(self) -> TracedOp | None:
        """The operator of the forward pass whose derivative is bad; None in a custom function's own backward.

        The second derivative of a root is the derivative of the quotient in its first: it is the root that is told.
        """
        op = self.first_gradient.op
        if self.is_hidden:
            return self.op
        if self.is_of_script:
            return self._inside_script
        forward = self._differentiated_by(op)
        while forward is not None and forward.in_backward and (before := self._differentiated_by(forward)) is not None:
            forward = before
        return forward

    @property
    def is_of_script(self) -> bool:
        """Whether the derivative is one of a TorchScript graph, which is differentiated as a whole."""
        op = self.first_gradient.op
        forward = self._differentiated_by(op) if op.in_backward else None
        return forward is not None and not forward.in_backward and script_graph.begins_graph(forward)

    @cached_property
    def _inside_script(self) -> TracedOp | None:
        forward = self._differentiated_by(self.first_gradient.op)
        return script_graph.singular_inside(self.trace.ops, forward, self.replayer) if forward is not None else None

    def _differentiated_by(self, op: TracedOp) -> TracedOp | None:
        forward = self.trace.ops[op.forward] if op.forward is not None else None
        return forward if forward is not None and forward.line == op.line else None

    @cached_property
    def forward(self) -> Evidence:
        """The same failure seen at the forward operator that is differentiated."""
        op = self.differentiated
        if op is None or op is self.op:
            return self
        here = self.first_gradient
        same = bool(op.outputs) and op.outputs[0].shape == here.op.outputs[here.result].shape
        link = Link(op, 0, here.flat if same else None, here.kind)
        return Evidence(self.bad, Chain([link]), self.outcome, self.replayer)

    @cached_property
    def is_finite_in_float32_at_unit_scale(self) -> bool:
        """Whether the whole step computed in float32, with the loss not scaled, has finite gradients."""
        if self.replayer is None:
            return self.is_finite_in_float32
        outcome = self.step_in_float32
        return outcome is not None and not outcome.is_bad

    # --- whose --------------------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, Any]:
        """Which parameters have finite gradients and which have not: the boundary is half of the answer."""
        names = self.replayer.parameter_names if self.replayer is not None else {}
        finite: list[str] = []
        bad: list[str] = []
        for tensor, gradient in self.outcome.gradients:
            side = finite if numerics.is_finite(gradient) else bad
            side.append(names.get(id(tensor)) or tensor_called(tensor))
        return {
            "nonfinite": bad[:NAMES],
            "nonfinite_count": len(bad),
            "finite": finite[-NAMES:],
            "finite_count": len(finite),
        }

    def boundary(self) -> str:
        """Where the bad gradients end, in words; "" where all are bad."""
        of = self.parameters()
        if not of["finite"]:
            return ""
        total = of["nonfinite_count"] + of["finite_count"]
        some = ", ".join(of["finite"][-3:])
        more = f" and {of['finite_count'] - 3} more" if of["finite_count"] > 3 else ""
        has = "has" if of["nonfinite_count"] == 1 else "have"
        return (
            f" {of['nonfinite_count']} of {total} parameters {has} bad gradients, the first is {of['nonfinite'][0]}; those of "
            f"{some}{more} are finite."
        )

    def numbers(self) -> dict[str, Any]:
        facts = super().numbers()
        if self.bad.is_of_gradients:
            facts["parameters"] = self.parameters()
        if self.outcome.loss is not None:
            facts["loss"] = self.outcome.loss
        if self.bad.loss_scale is not None:
            facts["loss_scale"] = self.bad.loss_scale
        if self.differentiated is not None:
            facts["derivative_of"] = self.differentiated.name
        return facts


class OpaqueGradient(OpaqueEvidence, GradientEvidence):
    """What is known of a kernel that no operator shows and that computes a derivative, in a custom function's `backward`."""

    phase = "backward"


def gradient_evidence(bad: BadResult, chain: Chain, outcome: Outcome, replayer: Replayer | None) -> GradientEvidence:
    """The evidence about where bad gradients begin."""
    memory = chain.given.memory if chain.given is not None else None
    is_opaque = memory is not None and memory[0].in_backward
    return (OpaqueGradient if is_opaque else GradientEvidence)(bad, chain, outcome, replayer)


def locate_gradient(bad: BadResult, replayer: Replayer, deadline: float = math.inf) -> Evidence:
    """Where bad gradients begin. One or two replays, three where the loss scale has no part in it.

    Raises ReplayError where the step cannot be run again, or has finite gradients when it is.
    """
    outcome = replayer.run()
    if not outcome.is_bad:
        fault = fault_of_compiled_code(bad, replayer, outcome, deadline)
        if fault is not None:
            return fault
        raise DoesNotRepeatError("run again, the step has finite gradients")
    chain = earliest_chain(outcome)
    if chain is None:
        raise ReplayError("no operator of the replay made the bad gradient")
    evidence = gradient_evidence(bad, chain, outcome, replayer)
    if bad.loss_scale is None or bad.loss_scale <= 1:
        return evidence
    factor = 1.0 / bad.loss_scale
    evidence.at_unit_scale = replayer.run(Variant(loss_scale_factor=factor), traced=False)
    if not evidence.at_unit_scale.is_bad:
        return evidence
    replayer.scale_factor = factor
    evidence.at_unit_scale = replayer.run(Variant(loss_scale_factor=1.0))
    chain = earliest_chain(evidence.at_unit_scale)
    if chain is None:
        return evidence
    at_one = gradient_evidence(bad, chain, evidence.at_unit_scale, replayer)
    at_one.at_unit_scale = evidence.at_unit_scale
    return at_one


def is_only_the_scale(bad: BadResult, replayer: Replayer) -> bool:
    """Whether the step's gradients are finite at a loss scale of 1. One replay."""
    assert bad.loss_scale is not None
    return not replayer.run(Variant(loss_scale_factor=1.0 / bad.loss_scale), traced=False).is_bad


def largest_finite_scale(used: float, is_finite: Callable[[float], bool]) -> float:
    """The largest power of two below the loss scale at which the step is finite, by bisection; it is at 1."""
    low, high = 0, max(1, math.ceil(math.log2(used)))  # 2**low is finite, 2**high is not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_finite(2.0**middle) else (low, middle)
    return 2.0**low


def earliest_chain(outcome: Outcome) -> Chain | None:
    """Of the chains behind the bad gradients, the one that begins first."""
    bad: list[Tensor] = [t for _, t in outcome.targets if not numerics.is_finite(t)]
    step = max(1, len(bad) // TARGETS)
    best: Chain | None = None
    visited = Visited()
    for tensor in [*bad[::step], *bad[-1:]]:
        elements = bad_elements(tensor)
        chain = chain_from(outcome.trace, traced(tensor), elements, visited) if elements is not None else None
        if chain is None:
            continue
        if best is None or (chain.intended, chain.head.op.index) < (best.intended, best.head.op.index):
            best = chain
    return best
