"""loss-scale-overflow: gradients overflow only because of the loss scale; at a lower scale they are finite.

What happens   GradScaler begins at 65536 and doubles now and then. Where a gradient times the scale is beyond float16's
               65504, it finds Inf, skips the step and halves the scale. So it finds the scale that fits.
Why it hurts   hardly: a step is lost now and then. A norm of gradients that is logged in such a step is Inf or NaN,
               which is no failure, and should not enter a running mean.
Instead        nothing. To lose no steps at the start, begin lower: GradScaler(init_scale=...). A float16 loss times
               65536 is always Inf: compute the criterion in float32 (inside autocast, or on logits.float()).
               A script that replaces Inf and NaN in gradients (nan_to_num) does so after scaler.unscale_(optimizer): before it,
               the scaler never learns that the scale is too high.
Not this       gradients that overflow at every scale: see gradient-overflow, singular-gradient and scale-collapse.
"""

from __future__ import annotations

from ampguard import numerics
from ampguard.diagnose import words
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Finding, Proposal, cause
from ampguard.diagnose.fixes.proposals import spelled
from ampguard.diagnose.gradients import GradientEvidence, largest_finite_scale
from ampguard.replay.variants import Variant


@cause("loss-scale-overflow", phases=("forward", "backward"))
def loss_scale_overflow(evidence: Evidence) -> Finding | None:
    if isinstance(evidence, GradientEvidence) and evidence.bad.is_of_gradients:
        return of_gradients(evidence)
    return of_the_loss(evidence)


def of_the_loss(evidence: Evidence) -> Finding | None:
    """Losses that are not 0-d tensors stay float16 when they are scaled: their product with the scale, or its sum."""
    given = evidence.loss_scale_given if evidence.bad.kind == "loss" else None
    scale = float(given[1]) if given is not None else 1.0
    if not scale > 1.0 or evidence.precision is None or not is_finite_at(evidence, 1.0):
        return None
    fits = largest_finite_scale(scale, lambda lower: is_finite_at(evidence, lower))
    limit = numerics.largest(evidence.precision)
    if evidence.op.in_backward:
        what = "The step computes with gradients of a loss; multiplied by"
        why = ""
    else:
        what = "The loss is finite; multiplied by"
        why = (
            f" The loss itself is {words.precision(evidence)} and cannot hold {scale:g}: compute the criterion in float32 "
            f"(inside the autocast region, or on float() of its inputs)."
        )
    text = (
        f"{what} {scale:g}, {words.operator(evidence)} {words.place(evidence)} gives {spelled(evidence.kind)}: "
        f"{words.precision(evidence)} ends at {limit:g}. At a loss scale of {words.number(fits)} it fits.{why} Where the "
        f"gradients overflow as well, the scaler skips the step and lowers the scale: normal while it finds the scale that "
        f"fits."
    )
    how = f"begin lower, to lose no steps: GradScaler(init_scale={words.number(fits)})"
    lower = Proposal("lower-loss-scale", None, how, trial=lambda e: e.with_loss_scale(fits))
    wait = Proposal("wait", None, "nothing to do: the scaler goes on with a lower scale")
    return Finding(
        "loss-scale-overflow",
        text,
        weight=100,
        evidence={"finite_at_scale": fits, "loss_scale": scale},
        proposals=(wait, lower),
        phase="backward",
        severity="info",
    )


def is_finite_at(evidence: Evidence, scale: float) -> bool:
    """Whether the loss, multiplied by this scale, is finite. One replay."""
    replayer = evidence.replayer
    return replayer is not None and not replayer.run(evidence.with_loss_scale(scale), traced=False).is_bad


def of_gradients(evidence: GradientEvidence) -> Finding | None:
    scale = evidence.bad.loss_scale
    if scale is None or not evidence.is_only_the_scale:
        return None
    fits = evidence.finite_scale
    name = words.operator(evidence)
    peak = evidence.largest_gradient
    text = (
        f"With the loss multiplied by {scale:g}, {name} {words.place(evidence)} gives {spelled(evidence.kind)} in the backward "
        f"pass: the largest gradient itself is {words.number(peak)}. At a loss scale of {words.number(fits)} all "
        f"gradients are finite."
    )
    if is_low_precision_loss(evidence):
        text += (
            f" The loss itself is {words.precision(evidence)} and cannot hold {scale:g}: compute the criterion in float32"
            " (inside the autocast region, or on float() of its inputs)."
        )
    is_replaced = evidence.bad.is_replaced and not evidence.bad.is_own_scale
    is_normal = evidence.bad.is_held_off and not evidence.bad.has_ended_run
    advice = "nothing to do: the scaler goes on with a lower scale"
    if evidence.bad.has_ended_run:
        text += " The script raises an error at such gradients, and ends before the scaler can skip the step and lower the scale."
        advice = "raise no error at such gradients (error_if_nonfinite=False): scaler.step() skips the step"
    elif is_replaced:
        text += (
            " The script puts finite numbers in their place before the scaler looks at them: it neither skips the step nor "
            "lowers the scale, and every step may be made with what stands there instead."
        )
        advice = (
            "unscale first, so that the scaler sees what overflows: scaler.unscale_(optimizer); then replace as here"
        )
    elif evidence.bad.is_passed_over and evidence.bad.is_own_scale:
        text += (
            " The script gives the step up: normal while a scale that it lowers each time finds where it fits; at one that "
            "stays, the step is lost."
        )
        advice = "nothing to do where the script lowers its scale now"
    elif evidence.bad.is_passed_over:
        text += " The script gives the step up before the scaler sees it: it is lost, and nothing lowers the scale."
        advice = "let the scaler skip it and lower the scale: call its step() and update() here too"
    elif evidence.bad.is_held_off:
        text += " The scaler skipped this step and lowers the scale: normal while it finds the scale that fits."
    is_out_of_order = is_replaced or (evidence.bad.is_passed_over and not evidence.bad.is_own_scale)
    wait = Proposal("call-order" if is_out_of_order else "wait", None, advice)
    how = f"begin lower, to lose no steps: GradScaler(init_scale={words.number(fits)})"
    if evidence.bad.is_own_scale:
        how = (
            f"multiply the loss by at most {words.number(fits)}, and divide the gradients by the same; or let "
            f"torch.amp.GradScaler find the scale, and skip the steps that overflow"
        )
    lower = Proposal(
        "lower-loss-scale",
        None,
        how,
        trial=lambda e: Variant(loss_scale_factor=(fits or 1.0) / scale),
    )
    return Finding(
        "loss-scale-overflow",
        text,
        weight=100,
        evidence={"finite_at_scale": fits, "max_abs_gradient": peak},
        proposals=(wait, lower) if evidence.bad.is_held_off or is_replaced else (lower,),
        severity="info" if is_normal else "error",
    )


def is_low_precision_loss(evidence: GradientEvidence) -> bool:
    """Whether the overflow is that of the scale itself, in a loss of low precision."""
    forward = evidence.differentiated
    return (
        forward is not None
        and forward.short_name == "mul"
        and not forward.outputs[0].shape
        and any(numerics.is_low_precision(t.dtype) for t in forward.inputs)
        and forward.root is None
    )
