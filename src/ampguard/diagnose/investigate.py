"""From a bad result to an incident: replay, follow the chain, gather evidence, find the cause, try the fixes."""

from __future__ import annotations

import dataclasses
from os.path import basename
from typing import Any

from torch import Tensor

from ampguard import compat
from ampguard.capture.compiled.functions import CompiledFunction
from ampguard.capture.events.operands import held_in, refs_in, refs_of
from ampguard.capture.record import BadResult, GlueOp, Line, RootCall
from ampguard.diagnose import words
from ampguard.diagnose.budget import UNLIMITED, Budget
from ampguard.diagnose.compiled.fault import CompiledFault
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Finding, find_cause
from ampguard.diagnose.fixes.minimal import advice
from ampguard.diagnose.fixes.proposals import spelled
from ampguard.diagnose.fixes.script_casts import casts_behind
from ampguard.diagnose.fixes.trying import OTHER_PRECISION, tried, verified_fixes
from ampguard.diagnose.givens.vanished_before import with_what_vanished
from ampguard.diagnose.gradients import GradientEvidence
from ampguard.diagnose.locate.opaque import OpaqueEvidence
from ampguard.diagnose.own_update import as_update, is_an_update
from ampguard.diagnose.terms import Term, in_words, terms_of
from ampguard.diagnose.unseen import unseen
from ampguard.incident import Fix, Incident, Phase
from ampguard.numerics import dtype_name, is_finite


def explain(evidence: Evidence, budget: Budget, rank: int = 0, finding: Finding | None = None) -> Incident:
    """Say why it failed (a `finding`, where it is known already), and which fixes were seen to work."""
    finding = with_what_vanished(evidence, finding or find_cause(evidence) or unexplained(evidence))
    is_of_gradients = isinstance(evidence, GradientEvidence) and evidence.bad.is_of_gradients
    if isinstance(evidence, CompiledFault):
        budget = Budget(max(budget.deadline, evidence.search.end))
    fixes = verified_fixes(evidence, finding, budget)
    if is_of_gradients and finding.cause != "loss-scale-overflow":
        assert isinstance(evidence, GradientEvidence)
        finding = with_terms(finding, terms_of(evidence, budget))
        finding = dataclasses.replace(finding, explanation=finding.explanation + evidence.boundary())
    if evidence.bad.graph is not None:
        finding = dataclasses.replace(finding, explanation=finding.explanation + _where_captured(evidence.bad))
    incident = incident_of(
        evidence, finding, fixes, rank, rung="replay" if evidence.outcome.is_exact else "replay-inexact"
    )
    return incident if not isinstance(evidence, CompiledFault) else evidence.named(incident)


def _where_captured(bad: BadResult) -> str:
    """Of what was replayed without Python: how it is known."""
    line = bad.graph.line if bad.graph is not None else None
    captured = f", captured at {_named(line)}" if line is not None else ""
    return (
        f" The step ran as a CUDA graph{captured}; it was run again without the graph, as before the capture, on what the "
        f"graph's static inputs held."
    )


def explain_at_once(evidence: Evidence, finding: Finding, rank: int) -> Incident:
    """What is known before fixes are looked for; whether the step bears float32 is asked, which is one replay."""
    in_float32 = (proposal for proposal in finding.proposals if proposal.action == "disable-amp")
    fixes = [tried(evidence, proposal, UNLIMITED) for proposal in in_float32]
    evidence.half_cured.clear()  # that fix is tried again, in its turn
    rung = "replay" if evidence.outcome.is_exact else "replay-inexact"
    return incident_of(evidence, finding, tuple(fix for fix in fixes if fix is not None), rank, rung)


def with_terms(finding: Finding, terms: list[Term]) -> Finding:
    """The finding, with what is known about the terms of the loss."""
    text = in_words(terms)
    if not text:
        return finding
    facts = {**finding.evidence, "terms": [{"term": term.name, "is_bad": term.is_bad} for term in terms]}
    return dataclasses.replace(finding, explanation=finding.explanation + text, evidence=facts)


def explain_trace(evidence: Evidence, rank: int, reason: str) -> Incident:
    """Say why it failed; there is no step to replay, so no fix is tried."""
    finding = find_cause(evidence) or unexplained(evidence)
    fixes = tuple(Fix(p.action, p.target, p.how or advice(evidence, [evidence.op])) for p in finding.proposals)
    incident = incident_of(evidence, finding, fixes, rank, rung="live-trace")
    incident.evidence["not_replayed_because"] = reason
    return incident


def unexplained_incident(bad: BadResult, reason: str, rank: int, saw_bad_weights: bool = False) -> Incident:
    """A bad result of which nothing more is known than that it was bad: the last rung.

    `saw_bad_weights`: the steps after it read weights that were not finite any more.
    """
    roots = [e for e in bad.record.events if isinstance(e, RootCall)]
    last = roots[-1] if roots else None
    what = {
        "loss": "The loss",
        "output": "An output in evaluation",
        "buffer": "A buffer",
        "raised": "An operator",
        "gradient": "A gradient",
    }
    finite = _were_inputs_finite(bad, roots)
    known = {} if finite is None else {"inputs_are_finite": finite}
    low = last.modes.autocast_dtype if last is not None else None
    line = last.line if last is not None else bad.graph.line if bad.graph is not None else None
    return Incident(
        step=bad.step,
        rank=rank,
        mode=bad.mode,
        phase={"output": "forward", "gradient": "backward"}.get(bad.kind, "loss"),  # type: ignore[arg-type]
        severity="error",
        cause="unexplained",
        module=last.prefix if last is not None else None,
        op=None,
        dtype=dtype_name(low),
        location=line.location() if line is not None else None,
        explanation=f"{what[bad.kind]} of step {bad.step} was not finite. {_why_unknown(bad, reason, saw_bad_weights)}",
        evidence={"rung": "none", "not_replayed_because": reason} | known | _of_graph(bad),
    )


def _of_graph(bad: BadResult) -> dict[str, Any]:
    """In which CUDA graph it was computed, if in any."""
    if bad.graph is None:
        return {}
    return {"in_cuda_graph": _named(bad.graph.line) if bad.graph.line is not None else True}


def _were_inputs_finite(bad: BadResult, roots: list[RootCall]) -> bool | None:
    """Whether what the modules were given from outside was finite; None where not all of it is there any more."""
    inputs: list[Tensor | None] = [None] if bad.graph is not None and not roots else []
    for root in roots:
        inputs += [held.value for held in held_in((root.args, root.kwargs))]
        for ref in refs_in((root.args, root.kwargs)):
            maker = bad.record.event(ref.event)
            if not isinstance(maker, RootCall):
                inputs.append(maker.outputs[ref.output]() if maker is not None else None)
    if any(tensor is not None and not is_finite(tensor) for tensor in inputs):
        return False
    return None if any(tensor is None for tensor in inputs) else True


def _why_unknown(bad: BadResult, reason: str, saw_bad_weights: bool) -> str:
    if bad.graph is not None:
        return (
            f"It was computed in the replay of a CUDA graph, which runs without Python, and could not be computed again "
            f"without the graph ({reason}). To see where it begins, run what is captured as it is in every step, without a "
            f"graph."
        )
    if bad.is_of_gradients and reason.startswith("run again"):
        return f"The step was {reason} (a hook, the script itself)."
    if saw_bad_weights:
        return (
            f"The step could not be run again ({reason}), and the steps after it only read weights that it had spoiled."
        )
    return (
        f"The step could not be run again ({reason}), and the failure did not come back while the following steps were "
        f"watched operator by operator."
    )


def unexplained(evidence: Evidence) -> Finding:
    """No rule knows this operator: say what its numbers say."""
    if isinstance(evidence, OpaqueEvidence):
        return unseen(evidence)
    name = words.operator(evidence)
    if isinstance(evidence, GradientEvidence) and evidence.given is not None and not evidence.intended:
        return Finding(
            "unexplained",
            f"In the backward pass {name} read a {spelled(evidence.kind)} that none of its operators made: a hook put it there, "
            f"or a custom function.",
            weight=0,
        )
    if isinstance(evidence, GradientEvidence):
        return Finding(
            "unexplained",
            f"In the backward pass {name} gives {spelled(evidence.kind)}; no rule knows more about it.",
            weight=0,
        )
    if evidence.given is not None and not evidence.intended:
        return Finding(
            "unexplained",
            f"{name} read a {spelled(evidence.kind)} that was made where operators cannot be followed: inside a module that "
            f"did not return it, in compiled code, in another library, or after more operators outside modules than are kept "
            f"of one step.",
            weight=0,
        )
    code = "domain-error" if evidence.kind == "nan" else "overflow"
    operands = "operands that are finite, in float32 as well"
    if evidence.intended:
        code = "indeterminate"
        operands = "an infinity that the code meant to have"
    return Finding(
        code,
        f"{name} gives {spelled(evidence.kind)} from {operands}; no rule knows more about it.",
        weight=0,
        evidence={"rule": None},
    )


def _named(line: Line) -> str:
    return f"{basename(line.code.co_filename)}:{line.number}"


def incident_of(evidence: Evidence, finding: Finding, fixes: tuple[Fix, ...], rank: int, rung: str) -> Incident:
    bad, op = evidence.bad, finding.op or evidence.op
    line = finding.line or op.line
    is_hidden = finding.line is not None and line is evidence.op.line
    place = evidence.op if is_hidden else op  # a hidden value's module goes with its line
    facts: dict[str, Any] = {**evidence.numbers(), **finding.evidence, "rung": rung, **_of_graph(bad)}
    if "disable-amp" in evidence.losses_with:
        facts["loss_in_float32"] = evidence.losses_with["disable-amp"]
    if evidence.own_casts:
        facts["own_casts"] = list(map(_named, evidence.own_casts))
    if any(fix.verified and fix.action in OTHER_PRECISION for fix in fixes) and (behind := casts_behind(evidence)):
        facts["casts_behind"] = list(map(_named, behind))
    if bad.names:
        facts["poisoned_buffers"] = list(bad.names)
    if bad.kind == "gradient" and bad.error is not None:
        facts["raised"] = str(bad.error)
    dtype = finding.dtype or evidence.precision or evidence.result_dtype
    phase = finding.phase or phase_of(evidence)
    step = bad.step
    if phase == "parameters" and finding.cause == "fp16-underflow" and is_an_update(evidence):
        finding, phase = as_update(finding), "optimizer"
        if evidence.replayer is not None and evidence.replayer.ends_steps_with_backward:
            step = max(0, step - 1)  # the update of the step before
    return Incident(
        step=step,
        rank=rank,
        mode=bad.mode,
        phase=phase,  # type: ignore[arg-type]
        severity=finding.severity,
        cause=finding.cause,
        module=place.module if place.root is not None else place.within,
        op=op.name if finding.op is not None or evidence.called is None else None,
        dtype=dtype_name(dtype),
        location=line.location() if line is not None else None,
        explanation=finding.explanation,
        evidence=json_ready(facts),
        fixes=fixes,
    )


def phase_of(evidence: Evidence) -> Phase:
    """Forward inside a module that has parameters; loss after it; data before it."""
    if evidence.phase == "backward":
        return "backward"
    if evidence.bad.is_of_weights:
        return "parameters"
    if evidence.bad.is_of_preparation:
        return "data"
    roots = [e for e in evidence.events() if isinstance(e, RootCall)]
    event = next((e for e in evidence.events() if e.index == evidence.op.event), None)
    with_weights = [r for r in roots if compat.has_parameters(r.module)]
    if isinstance(event, RootCall) and isinstance(event.module, CompiledFunction) and evidence.op.root is None:
        called = [op.index for op in evidence.trace.ops if op.event == event.index and op.owner is not None]
        return "data" if called and evidence.op.index < called[0] else "loss"
    if isinstance(event, RootCall):
        after = any(r.index < event.index for r in with_weights)
        return "loss" if event not in with_weights and after else "forward"
    if isinstance(event, GlueOp) and any(_has_written(evidence, event, root) for root in roots if root.swapped_state):
        return "parameters"
    if isinstance(event, GlueOp) and with_weights and event.index < min(r.index for r in with_weights):
        return "loss" if _is_made_of_weights(evidence, event) else "data"
    return "loss"


def _has_written(evidence: Evidence, event: GlueOp, root: RootCall) -> bool:
    """Whether the weights of a call rest on what an operator gave: the script has written them."""
    known = {e.index: e for e in evidence.events() if isinstance(e, GlueOp)}
    waiting, seen = [ref.event for ref in refs_in(root.swapped_state)], set()
    while waiting:
        index = waiting.pop()
        if index in known and index not in seen:
            seen.add(index)
            waiting += [ref.event for ref in refs_of(known[index])]
    return event.index in seen


def _is_made_of_weights(evidence: Evidence, event: GlueOp) -> bool:
    """Whether what was computed before the first call of a model rests on what is trained: a transform of `torch.func`
    has called the model."""
    known = {e.index: e for e in evidence.events()}
    waiting, seen = [event.index], set()
    while waiting:
        op = known.get(waiting.pop())
        if op is None or op.index in seen:
            continue
        seen.add(op.index)
        if any(held.tensor.requires_grad for held in held_in((op.args, op.kwargs))):
            return True
        waiting += [ref.event for ref in refs_in((op.args, op.kwargs))]
    return False


def json_ready(value: Any) -> Any:
    """Evidence as JSON can hold it: no infinities, no tensors."""
    if isinstance(value, dict):
        return {str(k): json_ready(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(v) for v in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)
