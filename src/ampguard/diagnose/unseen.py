"""Bad values that no operator made and that do not simply leave the type: what can be said of whoever wrote them."""

from __future__ import annotations

from typing import Any

import torch

from ampguard.diagnose import words
from ampguard.diagnose.finding import Finding, Proposal
from ampguard.diagnose.fixes.proposals import precision_fixes, spelled
from ampguard.diagnose.locate.opaque import OpaqueEvidence
from ampguard.replay.variants import Variant


def unseen(evidence: OpaqueEvidence) -> Finding:
    """The writer of memory by what the step gives in other precisions; the boundary alone, where that says nothing."""
    if evidence.is_unwritten:
        return _unwritten(evidence)
    beyond = evidence.widest()
    if beyond is not None:
        largest = f"{torch.finfo(torch.float32).max:.2g}"
        text = f"{_begun(evidence)}: {words.number(beyond)} in float64, beyond float32's range ({largest}).{evidence.remark}"
        return Finding("overflow", text, weight=0, evidence={"result_fp64": beyond, "is_unseen": True})
    wide = evidence.element(evidence.in_float32) if evidence.is_finite_in_float32 else None
    proposals: tuple[Proposal, ...] = ()
    if wide is not None:
        low = words.precision(evidence)
        known = (
            f": in float32 it is {words.number(wide)}, so its arithmetic in {low} overflows on its way, or divides by what {low} "
            f"flushes to 0."
        )
        proposals = precision_fixes(evidence)
    elif any(tensor.bad is not None for tensor in evidence.op.around):
        known = ", and what it was given was not finite everywhere."
    else:
        known = ", and what it was given was finite. No operator tells how it came about; it is for the kernel to be looked at."
    text = _begun(evidence) + known + evidence.remark
    return Finding("unexplained", text, weight=0, evidence={"is_unseen": True}, proposals=proposals)


def _begun(evidence: OpaqueEvidence) -> str:
    called = words.operator(evidence)
    return f"{called[0].upper()}{called[1:]} writes {spelled(evidence.kind)} {words.place(evidence)}"


def _unwritten(evidence: OpaqueEvidence) -> Finding:
    def cleared(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs).zero_()

    name = words.name(evidence.op)
    text = (
        f"The memory that {name} asks for {words.place(evidence)} is read before anybody has written to it: it holds what it was "
        f"filled with beforehand in a replay, and {spelled(evidence.kind)} by chance in this step."
    )
    how = f"ask for memory that holds zeros (`{name.replace('empty', 'zeros')}`), or fill it first: {words.code(evidence)}"
    fix = Proposal(
        "initialise-parameter",
        words.region(evidence),
        how,
        trial=lambda e: Variant(at_places={e.op.place: cleared}),
    )
    return Finding("unexplained", text, weight=0, evidence={"is_unwritten": True}, proposals=(fix,))
