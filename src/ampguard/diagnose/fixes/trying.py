"""Fixes, tried on the failing step: what works first, then what was not tried, then what did not work."""

from __future__ import annotations

import math

import torch

from ampguard import compat
from ampguard.capture.record import RootCall
from ampguard.diagnose import words
from ampguard.diagnose.attempts import ON_THE_BRINK, attempt, described, is_far, is_of_use
from ampguard.diagnose.budget import Budget
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Finding, Proposal
from ampguard.diagnose.fixes.minimal import advice, smallest_float32_region
from ampguard.diagnose.fixes.script_casts import own_casts_of
from ampguard.diagnose.fixes.second_place import fixes_behind, fixes_beside
from ampguard.diagnose.fixes.taken_out import stays_for_a_number
from ampguard.diagnose.gradients import GradientEvidence
from ampguard.incident import Fix
from ampguard.numerics import NAN, stats
from ampguard.replay.differentiated import has_finite_gradients, raises_for_writes
from ampguard.replay.outcome import Outcome
from ampguard.replay.rebuild import Replayer
from ampguard.replay.trace import Trace
from ampguard.replay.variants import Variant

RUNAWAY = 1e10
"""A loss (or a result in evaluation) beyond it is finite and no use: a tighter bound is tried."""

ALIKE = 0.1
"""How far a fix of the gradients may move a loss that was finite, as a share of it, and be told among the first."""

SAME = 1e-3
"""How far a loss may lie from itself, as a share of it."""

ROUNDINGS = 8
"""The same where it is computed in another precision, in units of that precision."""

FAR = ", far from the"

TOO_HIGH = "; at the script's own loss scale of"

SMALLER_UPDATES = (
    "where the updates have made it so large (the losses before were finite): a smaller learning rate, or "
    "torch.nn.utils.clip_grad_norm_(parameters, 1.0) before the optimizer's step"
)

OTHER_PRECISION = frozenset({"force-fp32", "use-bf16", "disable-amp"})
VERIFIED_FIRST = {True: 0, None: 1, False: 2}


def verified_fixes(evidence: Evidence, finding: Finding, budget: Budget) -> tuple[Fix, ...]:
    """Try each proposal on the failing step; what works first, then what was not tried, then what did not work."""
    fixes = [fix for proposal in finding.proposals if (fix := tried_in_turn(evidence, proposal, budget)) is not None]
    if not any(fix.verified and fix.action not in OTHER_PRECISION for fix in fixes):
        both = fixes_behind(evidence, budget) or fixes_beside(evidence, budget)
        fixes = [fix for fix in fixes if all(fix.how != joint.of for joint in both)] + [joint.fix for joint in both]
    if (
        finding.cause == "overflow"
        and evidence.bad.mode == "train"
        and not any(fix.verified and FAR not in (fix.outcome or "") for fix in fixes)
    ):
        fixes.append(Fix("clip-gradients", None, SMALLER_UPDATES))
    return tuple(sorted(fixes, key=lambda fix: _rank(evidence, fix)))


def _rank(evidence: Evidence, fix: Fix) -> tuple[int, bool, bool]:
    return VERIFIED_FIRST[fix.verified], TOO_HIGH in (fix.outcome or ""), fix in evidence.changing


def tried_in_turn(evidence: Evidence, proposal: Proposal, budget: Budget) -> Fix | None:
    """The proposal, or a tighter one that works where it does not."""
    fix = tried(evidence, proposal, budget)
    size = evidence.losses_with.get(proposal.action, evidence.results_with.get(proposal.action))
    is_enough = fix is not None and fix.verified is not False
    is_usual = size is None or (abs(size) < RUNAWAY and not is_far(size, evidence.usual_loss))
    is_enough = is_enough and is_usual and (size is None or (fix is not None and fix.verified is True))
    if fix is None or is_enough or proposal.otherwise is None:
        return fix
    tighter = tried_in_turn(evidence, proposal.otherwise, budget)
    return tighter if tighter is not None and tighter.verified else fix


def tried(evidence: Evidence, proposal: Proposal, budget: Budget) -> Fix | None:
    """The fix as one replay shows it: verified, not tried (None), or not enough."""

    def fix(verified: bool | None, effect: str | None = None, how: str | None = None, target: str | None = None) -> Fix:
        aim = proposal.target if target is None else target  # ("" is the root module)
        return Fix(proposal.action, aim, how or proposal.how, verified, effect)

    if proposal.known is not None:
        return fix(not proposal.known.is_bad, described(proposal.known, evidence.bad))
    replayer = evidence.replayer
    is_trial = proposal.search or proposal.trial is not None
    is_known = proposal.action == "disable-amp" and evidence.seen_in_float32 is not None  # most causes ask for it
    if not is_trial or replayer is None or (budget.is_spent and not is_known):
        return fix(None, how=advice(evidence, [evidence.op]) if proposal.search else None)
    target, how = proposal.target, proposal.how + own_casts_of(evidence, proposal)
    try:
        if proposal.search:
            how = advice(evidence, [evidence.op])
            found = smallest_float32_region(evidence, budget)
            if found is None:
                return fix(False, "the replayed step is still bad", how)
            target, how, variant, outcome = found
        else:
            assert proposal.trial is not None
            variant = proposal.trial(evidence)
            known = evidence.seen_in_float32 if variant is evidence.all_in_float32 else None
            outcome = known or attempt(evidence.bad, replayer, variant)
            if variant is evidence.all_in_float32:
                evidence.seen_in_float32 = outcome
    except Exception as error:
        return fix(None, f"the replay with it raised: {error or type(error).__name__}"[:300], how)
    verified, effect = judged(evidence, replayer, variant, outcome, budget, how)
    if verified and (before := _finite_loss_before(evidence, outcome)) is not None:
        changing = fix(True, f"{effect}, no longer {before:.4g}: it changes more than the derivative", how, target)
        evidence.changing.append(changing)
        return changing
    if verified is False and outcome.is_bad and proposal.action not in OTHER_PRECISION:
        evidence.still_bad.append((variant, fix(False, effect, how, target)))
    if verified and outcome.loss is not None and not proposal.search:
        evidence.losses_with[proposal.action] = outcome.loss
    if verified and proposal.action not in OTHER_PRECISION and not is_of_use(outcome, evidence.bad):
        return fix(None, f"{effect}: finite, and no loss to go on with", how, target)
    if verified and is_far(outcome.loss, evidence.usual_loss) and evidence.bad.mode == "train":
        return fix(True, f"{effect}{FAR} {evidence.usual_loss:.4g} of the steps before", how, target)
    if verified and outcome.loss is None and _goes_on(evidence, outcome) and not proposal.search:
        evidence.results_with[proposal.action] = peak = largest_result(outcome)
        if peak >= ON_THE_BRINK:
            return fix(
                None, f"{effect}; but it reaches {words.number(peak)}, and what follows may overflow again", how, target
            )
    if verified:
        evidence.mended |= proposal.mends
    return fix(verified, effect, how, target)


def _goes_on(evidence: Evidence, outcome: Outcome) -> bool:
    """Whether the script computes on from what was judged: in evaluation, or where an exception cut the step off before
    it had a loss."""
    if evidence.bad.kind == "output":
        return evidence.bad.mode == "eval"
    return evidence.bad.kind in ("loss", "raised") and outcome.loss is None


def largest_result(outcome: Outcome) -> float:
    """The largest |value| of what was judged: the script goes on with it, and a replay ends there."""
    values = [t.detach() for _, t in outcome.targets if t.is_floating_point() and t.numel() and compat.is_dense(t)]
    return max((stats(value).max_abs or 0.0 for value in values), default=0.0)


def judged(
    evidence: Evidence, replayer: Replayer, variant: Variant, outcome: Outcome, budget: Budget, how: str
) -> tuple[bool | None, str]:
    """Whether a step that was replayed with a change is cured, and in words."""
    if evidence.bad.is_of_gradients and not outcome.has_true_derivatives:
        return None, "a replay cannot show it: what it changes is differentiated as it was before"
    if outcome.is_bad:
        why_not = stays_for_a_number(evidence, variant)
        return (None, why_not) if why_not is not None else (False, described(outcome, evidence.bad))
    changed = changed_loss(evidence, variant, outcome)
    if changed is not None:
        return False, changed
    if variant not in evidence.finite_gradients and not budget.is_spent:
        evidence.finite_gradients[variant] = has_finite_gradients(replayer, variant)
    gradients = evidence.finite_gradients.get(variant)
    loss = f" ({outcome.loss:.4g})" if outcome.loss is not None else ""
    asked = variant if gradients is None else _without_autocast(evidence, variant)
    if asked is not None and not budget.is_spent and raises_for_writes(replayer, asked):
        return (
            False,
            f"the loss is finite{loss}, and backward() raises: a tensor that it needs is written to in the forward pass",
        )
    if gradients is False:
        evidence.half_cured.append((variant, how))
        return False, f"the loss is finite{loss}, its gradients are not"
    effect = described(outcome, evidence.bad, with_gradients=gradients is True)
    return True, effect + _left_out(evidence, variant, outcome) + _at_own_scale(evidence, replayer, variant, gradients)


def _without_autocast(evidence: Evidence, variant: Variant) -> Variant | None:
    """How all in float32 is written: outside autocast nothing is cast, where the replay casts to float32 and so copies.

    None where no call changes a buffer: then a copy is as good as what it was made of.
    """
    roots = [e for e in evidence.events() if isinstance(e, RootCall)]
    if variant is not evidence.all_in_float32 or not any(b.copy is not None for root in roots for b in root.buffers):
        return None
    return Variant(force_fp32=frozenset(id(root.module) for root in roots))


def changed_loss(evidence: Evidence, variant: Variant, outcome: Outcome) -> str | None:
    """For a value that the loss does not see: a fix must leave the loss as it is. What it did where it does not.

    Where NaN was compared with something the loss has seen it after all: a fix gives it the part that was left out.
    """
    losses = _other_loss(evidence, variant, outcome)
    if losses is None or compares_nan(evidence.outcome.trace):
        return None
    return f"the replayed step is finite, but its loss is no longer {losses[0]:.4g}: it is {losses[1]:.4g}"


def _finite_loss_before(evidence: Evidence, outcome: Outcome) -> float | None:
    """The loss of a step of which only the gradients were bad, where a fix makes it quite another one; else None."""
    before, after = evidence.outcome.loss, outcome.loss
    if not isinstance(evidence, GradientEvidence) or evidence.is_hidden or before is None or after is None:
        return None
    is_alike = not math.isfinite(before) or math.isclose(before, after, rel_tol=ALIKE, abs_tol=ALIKE)
    return None if is_alike else before


def _left_out(evidence: Evidence, variant: Variant, outcome: Outcome) -> str:
    losses = _other_loss(evidence, variant, outcome)
    return f", no longer {losses[0]:.4g}: comparisons with NaN left a part of it out" if losses is not None else ""


def _at_own_scale(evidence: Evidence, replayer: Replayer, variant: Variant, gradients: bool | None) -> str:
    """What is left to do where the gradients are finite at a loss scale of 1, and not at the one that the script uses."""
    scale = evidence.bad.loss_scale
    if not gradients or scale is None or has_finite_gradients(replayer, variant, at_own_scale=True) is not False:
        return ""
    return f"{TOO_HIGH} {words.number(scale)} its gradients are not: lower that as well"


def _other_loss(evidence: Evidence, variant: Variant, outcome: Outcome) -> tuple[float, float] | None:
    """The loss before and after a fix of what is hidden from it, where it is another one, and not the same rounded otherwise."""
    if not isinstance(evidence, GradientEvidence) or not evidence.is_hidden or outcome.is_bad:
        return None
    before, after = evidence.outcome.loss, outcome.loss
    if before is None or after is None:
        return None
    is_same = math.isclose(before, after, rel_tol=_rounding(evidence, variant), abs_tol=1e-6)
    return None if is_same else (before, after)


def _rounding(evidence: Evidence, variant: Variant) -> float:
    """How far the same loss may lie from itself, as a share of it: more where it is computed in another precision."""
    if not (variant.convert or variant.force_fp32 or variant.fp32_lines):
        return SAME
    precisions = [dtype for dtype in (evidence.precision, variant.convert) if dtype is not None]
    return max([SAME, *(ROUNDINGS * torch.finfo(dtype).eps for dtype in precisions)])


def compares_nan(trace: Trace) -> bool:
    """Whether the forward pass compared NaN with something (each comparison is false, as a minimum or a threshold sees it)."""
    comparisons = (op for op in trace.ops if not op.in_backward and any(out.dtype is torch.bool for out in op.outputs))
    makers = (operand.made_by for op in comparisons for operand in op.inputs)
    bad = (trace.ops[maker[0]].outputs[maker[1]].bad for maker in makers if maker is not None)
    return any(bool((elements.kinds == NAN).any()) for elements in bad if elements is not None)
