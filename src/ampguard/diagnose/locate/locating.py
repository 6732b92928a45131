"""Where a failure begins: replay the step, and follow the chain of bad values back to its first operator."""

from __future__ import annotations

import time

import torch

from ampguard.capture.glue.before_training import is_division, made_by
from ampguard.capture.raised import is_conversion_refusal
from ampguard.capture.record import BadResult, Held
from ampguard.diagnose.budget import Budget
from ampguard.diagnose.compiled.fault import fault_of_compiled_code
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.givens.kept_over_steps import times_written_over_steps
from ampguard.diagnose.givens.model_calls import model_calls
from ampguard.diagnose.givens.naming import buffer_behind
from ampguard.diagnose.gradients import GradientEvidence, earliest_chain, gradient_evidence, locate_gradient
from ampguard.diagnose.locate.behind_zero import hidden_overflow_behind
from ampguard.diagnose.locate.chain import Chain, Link
from ampguard.diagnose.locate.chosen_badly import choice_behind
from ampguard.diagnose.locate.opaque import opaque_evidence
from ampguard.diagnose.locate.rows import is_masks_doing
from ampguard.diagnose.locate.slicing import COPIES, at_the_data, chain_from
from ampguard.errors import ReplayError
from ampguard.numerics import NEG_INF
from ampguard.replay.outcome import Outcome
from ampguard.replay.rebuild import Replayer
from ampguard.replay.trace import Trace, TracedOp, TracedTensor, asked_dtype, bad_elements, traced

NOT_MADE = "no operator of the replay made the bad value"

SEARCHING = COPIES | {"add", "sub"}
"""What a search makes scores of (Viterbi, time warping): sums and choices. A mean, or a product, is a figure of its own."""

CHOOSING = frozenset(["max", "amax", "min", "amin"])

OF_EACH = frozenset(["_log_softmax", "log_softmax", "mul", "div"])
"""What leaves the infinity of an element alone: its log-probability, its score at another temperature."""


def locate(bad: BadResult, replayer: Replayer, budget: Budget | None = None) -> Evidence | None:
    """Where the failure begins. One traced replay.

    None where the bad values are infinities that the code meant to return. Raises ReplayError where the step cannot be
    run again or is not bad when it is.
    """
    budget = budget or Budget.for_step(0.0, time.perf_counter())
    if bad.kind == "gradient":
        return locate_gradient(bad, replayer, budget.deadline)
    outcome = replayer.run()
    if not outcome.is_bad:
        fault = fault_of_compiled_code(bad, replayer, outcome, budget.deadline)
        if fault is not None:
            return fault
        raise ReplayError("the replayed step is finite: it does not repeat itself")
    chain = chain_of(outcome)
    if chain is None:
        raise ReplayError(NOT_MADE)
    opaque = opaque_evidence(bad, chain, outcome, replayer)
    if opaque is not None:
        return opaque
    seen = Evidence(bad, chain, outcome, replayer)
    if _was_computed_unseen(outcome, chain) or _was_divided_by_zero(seen) or _has_grown_over_steps(seen):
        chain.intended = False
    models = [event.index for event in model_calls(replayer.events)]
    from_data = at_the_data(chain, outcome.trace, models)
    if from_data is not chain and not is_masks_doing(Evidence(bad, chain, outcome, replayer)):
        chain = from_data
    if is_on_purpose(bad, chain):
        return None
    evidence = evidence_of(bad, chain, outcome, replayer)
    return hidden_overflow_behind(evidence) or choice_behind(evidence) or evidence


def _was_computed_unseen(outcome: Outcome, chain: Chain) -> bool:
    """Whether the chain ends at a tensor that was computed from weights by operators of which there is no record.

    Nobody meant it to be infinite. Of a loop of small operators outside modules only so many are kept.
    """
    stand_in = outcome.stand_ins.get(chain.given.tensor.storage) if chain.given is not None else None
    return stand_in is not None and stand_in[1].grad_fn is not None


def _was_divided_by_zero(evidence: Evidence) -> bool:
    """Whether the chain ends at an infinity that a division made before the first step, which nobody meant either."""
    if evidence.given is None or not evidence.intended or evidence.replayer is None:
        return False
    buffer = buffer_behind(evidence)
    tensor = buffer.held if buffer is not None else evidence.given_tensor
    found = evidence.replayer.before_training.maker_of(tensor) if tensor is not None else None
    return found is not None and any(is_division(event) for event in made_by(*found))


def _has_grown_over_steps(evidence: Evidence) -> bool:
    """Whether the chain ends at a +Inf in what the script keeps, and has written to in each step: a sum has outgrown its type."""
    tensor = evidence.given_tensor if evidence.given is not None and evidence.intended else None
    if tensor is None or evidence.replayer is None or not bool(tensor.detach().isposinf().any()):
        return False
    return times_written_over_steps(tensor, evidence.bad.step, evidence.replayer) > 0


def evidence_of(bad: BadResult, chain: Chain, outcome: Outcome, replayer: Replayer | None) -> Evidence:
    """The evidence of a bad loss or output; that of a derivative, where the step computes with one that is bad."""
    evidence = Evidence(bad, chain, outcome, replayer)
    is_derivative = evidence.op.in_backward and evidence.given is None
    return GradientEvidence(bad, chain, outcome, replayer) if is_derivative else evidence


def locate_in_trace(bad: BadResult, trace: Trace) -> Evidence | None:
    """The same from a trace that was taken while the step ran."""
    targets = []
    for target in bad.targets:
        if isinstance(target, Held):
            targets.append(("", target.tensor))
        elif (event := bad.record.event(target.event)) is not None and target.output < len(event.outputs):
            tensor = event.outputs[target.output]()
            if tensor is not None:
                targets.append(("", tensor))
    outcome = Outcome(is_bad=True, is_exact=True, trace=trace, targets=targets, error=bad.error)
    if bad.kind == "gradient":
        outcome.gradients = [(p, p.grad) for p in bad.parameters if p.grad is not None]
        outcome.targets = [("", gradient) for _, gradient in outcome.gradients]
        chain = earliest_chain(outcome)
        return gradient_evidence(bad, chain, outcome, None) if chain is not None else None
    chain = chain_of(outcome)
    opaque = opaque_evidence(bad, chain, outcome, None) if chain is not None else None
    if opaque is not None:
        return opaque
    if chain is None or is_on_purpose(bad, chain):
        return None
    return evidence_of(bad, chain, outcome, None)


def chain_of(outcome: Outcome) -> Chain | None:
    """The chain behind the first bad target; that of the refused operator where PyTorch raised."""
    trace = outcome.trace
    if is_conversion_refusal(outcome.error):
        refused = next((op for op in reversed(trace.ops) if op.refused), None)
        return chain_at(refused) if refused is not None else None
    fallback: Chain | None = None
    for _, tensor in outcome.targets:
        bad = bad_elements(tensor)
        if bad is None:
            continue
        chain = chain_from(trace, traced(tensor), bad)
        if chain is None:
            continue
        if not chain.intended or chain.conversion() is not None:
            return chain
        fallback = fallback or chain
    if fallback is None and not outcome.targets:
        last = next((op for op in reversed(trace.ops) if op.is_bad), None)
        if last is not None:
            position = next(i for i, out in enumerate(last.outputs) if out.bad is not None)
            out = last.outputs[position]
            return chain_from(trace, out, out.bad) if out.bad is not None else None
    return fallback


def chain_at(op: TracedOp) -> Chain:
    """A chain of one operator that never returned."""
    if not op.outputs:
        shape = op.inputs[0].shape if op.inputs else ()
        dtype = op.inputs[0].dtype if op.inputs else asked_dtype(op) or torch.float32
        op.outputs.append(TracedTensor(shape, dtype, 0))
    return Chain([Link(op, 0, None, NEG_INF)])


def _is_searched(chain: Chain) -> bool:
    """Whether the infinity is the score of a path, or that of the worst of all elements (the least log-probability)."""
    names = [link.op.short_name for link in chain.links[:-1]]
    known = SEARCHING | OF_EACH if names and names[0] in CHOOSING else SEARCHING
    return all(name in known for name in names)


def is_on_purpose(bad: BadResult, chain: Chain) -> bool:
    """An infinity that the code wrote, and kept in a buffer, returned or read in evaluation, unchanged: a mask, masked
    logits, a sentinel, the score of a path that does not exist."""
    if not chain.intended or chain.conversion() is not None:
        return False
    is_score = bad.kind == "loss" and bad.mode == "eval" and chain.given is None
    return bad.kind in ("output", "buffer") or (is_score and _is_searched(chain))
