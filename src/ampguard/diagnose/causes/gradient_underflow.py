"""gradient-underflow: a large share of gradients is flushed to zero; learning is silently lost.

What happens   a loss that is a mean over many elements has gradients of 1e-8, and float16 ends at 6e-8 below: they become
               0 on their way back. Nothing fails, the loss may even fall: these weights just do not learn. Where a weight's
               gradient is a sum over many positions, a few that were not flushed are left in it: not 0, and wrong.
Why it hurts   training looks healthy and ends worse; layers far from the loss stay as they were initialised.
Instead        scale the loss: torch.amp.GradScaler (its default of 65536 is meant for this), and do not limit its scale;
               or train in bfloat16, which has float32's range.
Not this       zeros that ReLU or dropout make: those are zero in float32 too, and are not counted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from ampguard.capture.record import BadResult
from ampguard.diagnose import words
from ampguard.diagnose.hidden_overflow import hidden_overflow, overflow_behind
from ampguard.diagnose.protocol.owners import tensor_called
from ampguard.incident import Fix, Incident
from ampguard.numerics import dtype_name, is_low_precision
from ampguard.replay.names import parameter_names
from ampguard.replay.outcome import Outcome
from ampguard.replay.rebuild import Replayer
from ampguard.replay.trace import TracedOp
from ampguard.replay.variants import Variant

LOST_SHARE = 0.3
"""Of the gradient elements that float32 has: above it, a layer's learning is lost."""

LOST_DISTANCE = 0.5
"""Between a layer's gradient and float32's, in lengths of the latter: as above, where sums over many flushed terms are left."""

LEAST_SHARE = 0.01
"""Of all elements of the step, for vectors alone: a bias whose few elements are lost is no layer that does not learn."""

NEGLIGIBLE = 2.0**-24
"""Of a parameter's largest gradient: what is smaller is lost in float32's own rounding of its sums."""

SAVED = 1 / 3
"""A larger loss scale saves them where it leaves no more than this of the distance."""

SAVED_SHARE = 0.02
SCALES = tuple(2.0**k for k in (16, 12, 8, 4, 20, 24))
"""Factors that are tried, the usual ones first."""
SHOWN = 8


MAX_PROOFS = 3
"""Suspicions that are followed."""

STEPS_A_PROOF = 1024
"""After so many steps one more is."""


def most_proofs(step: int) -> int:
    """How many suspicions are followed up to a step."""
    return MAX_PROOFS + step // STEPS_A_PROOF


@dataclass(frozen=True, slots=True)
class Loss:
    """What one parameter's gradient lost. `lost` and `present` count elements that are not 0, nor next to it, in float32."""

    name: str
    lost: int
    present: int
    is_matrix: bool

    @property
    def share(self) -> float:
        return self.lost / max(self.present, 1)


def prove_underflow(bad: BadResult, replayer: Replayer, rank: int, largest_loss: float = 0.0) -> Incident | None:
    """Compare the step's gradients with those of the same step in float32. None where little is lost.

    Nothing is where the loss has become negligible beside `largest_loss`, that of the run: there is nothing to learn left.
    Replays: the step as it ran, in float32, and with a few larger loss scales.
    """
    as_it_ran = replayer.run(Variant(zero_shares=True))
    in_float32 = replayer.run(Variant(convert=torch.float32, zero_shares=True))
    if in_float32.loss is not None and abs(in_float32.loss) < NEGLIGIBLE * largest_loss:
        return None
    names = parameter_names(replayer.events, replayer.names)
    losses = lost_gradients(as_it_ran, in_float32, names)
    lost, present = sum(loss.lost for loss in losses), sum(loss.present for loss in losses)
    hit = sorted((loss for loss in losses if loss.share >= LOST_SHARE), key=lambda loss: -loss.share)
    scale = bad.loss_scale or 1.0
    used = f"at a loss scale of {scale:g}" if bad.loss_scale is not None else "without a loss scale"
    distances: dict[str, float] = {}
    saved: float | None
    is_much = any(loss.is_matrix for loss in hit) or sum(loss.lost for loss in hit) >= LEAST_SHARE * present
    if hit and is_much:
        if is_rounding(as_it_ran, in_float32, replayer.run(Variant(convert=torch.float64), traced=False)):
            return None
        saved = saving_scale(replayer, in_float32, names, scale)
        behind = overflow_behind(as_it_ran, in_float32) if saved is None else None
        if behind is not None:
            by_layer = {loss.name: round(loss.share, 4) for loss in hit[:SHOWN]}
            share_lost = functools.partial(share_of_lost, in_float32, names)
            overflow = hidden_overflow(bad, replayer, behind, by_layer, share_lost, rank)
            if overflow is not None:
                return overflow
        worst = ", ".join(f"{loss.name} {loss.share:.0%}" for loss in hit[:SHOWN])
        text = (
            f"{lost} of {present} gradient elements ({lost / max(present, 1):.0%}) that are not 0 in "
            f"float32, nor negligible beside the largest of their parameter, are 0 in this step, {used}: they are below "
            f"float16's smallest number (6e-08) on their way back. By layer: {worst}."
        )
    else:
        found = distant_gradients(replayer, as_it_ran, in_float32)
        if found is None:
            return None
        by_parameter, factor = found
        saved = scale * factor
        by_size = sorted(by_parameter.items(), key=lambda item: -item[1])
        distances = {names.get(key, "a parameter"): round(off, 4) for key, off in by_size[:SHOWN]}
        worst = ", ".join(f"{name} {off:.0%}" for name, off in distances.items())
        text = (
            f"The gradients of {len(by_parameter)} of {len(as_it_ran.gradients)} parameters are not those of float32 in this "
            f"step, {used}: what they are summed up from is below float16's smallest number (6e-08) on its way back. They are "
            f"off by these shares of their length: {worst}. {lost / max(present, 1):.0%} of their elements are exactly 0."
        )
    begin = first_flush(as_it_ran, in_float32)
    fixes = (
        *_larger_scale(saved, scale, bad.loss_scale is not None, bool(distances)),
        _in_bfloat16(replayer, in_float32, names, bool(distances)),
    )
    line = begin.line if begin is not None else None
    precision = next((o.dtype for o in begin.outputs if is_low_precision(o.dtype)), None) if begin is not None else None
    return Incident(
        step=bad.step,
        rank=rank,
        mode="train",
        phase="backward",
        severity="warning",
        cause="gradient-underflow",
        module=begin.module if begin is not None and begin.root is not None else None,
        op=begin.name if begin is not None else None,
        dtype=dtype_name(precision) or "float16",
        location=line.location() if line is not None else None,
        explanation=text,
        evidence={
            "flushed": lost,
            "nonzero_in_float32": present,
            "flushed_share": lost / max(present, 1),
            "layers": distances or {loss.name: round(loss.share, 4) for loss in hit[:SHOWN]},
            "loss_scale": bad.loss_scale,
            "saving_scale": saved,
            "rung": "replay",
        },
        fixes=fixes,
    )


def begun_before(incident: Incident, since: int | None) -> Incident:
    """The same where the looks at the gradients before the replayed step had shown the same, since step `since`."""
    if since is None or since >= incident.step:
        return incident
    text = incident.explanation.replace(" in this step,", f" in step {incident.step},", 1)
    return msgspec.structs.replace(
        incident,
        step=since,
        explanation=f"{text} Gradients stand at float16's lower edge since step {since}.",
        evidence={**incident.evidence, "replayed_step": incident.step},
    )


def _larger_scale(saved: float | None, scale: float, has_scaler: bool, are_distant: bool) -> Iterable[Fix]:
    if saved is not None:
        what = "they are as in float32, and" if are_distant else f"less than {SAVED_SHARE:.0%} is flushed, and"
        how = (
            f"raise the loss scale from {words.number(scale)} to {words.number(saved)}"
            if has_scaler
            else f"scale the loss: torch.amp.GradScaler(init_scale={words.number(saved)})"
        )
        outcome = f"replayed at {words.number(saved)}: {what} all gradients are finite"
        yield Fix("raise-loss-scale", None, how, True, outcome)


def _in_bfloat16(replayer: Replayer, in_float32: Outcome, names: dict[int, str], are_distant: bool) -> Fix:
    """Verified where the same step in bfloat16 is finite and loses hardly any gradient."""
    how = "use bfloat16, which has float32's range: nothing is flushed at any scale"
    if are_distant:  # its own rounding is as far from float32 as many a sum of what is left
        return Fix("use-bf16", None, how)
    outcome = replayer.run(Variant(convert=torch.bfloat16), traced=False)
    share = share_of_lost(in_float32, names, outcome)
    if outcome.is_bad or share > SAVED_SHARE:
        return Fix("use-bf16", None, how)
    return Fix(
        "use-bf16", None, how, True, f"replayed in bfloat16: {share:.0%} is flushed, and all gradients are finite"
    )


def lost_gradients(as_it_ran: Outcome, in_float32: Outcome, names: dict[int, str]) -> list[Loss]:
    """What each parameter's gradient lost against float32."""
    wide = {id(parameter): gradient for parameter, gradient in in_float32.gradients}
    floor = NEGLIGIBLE**2 * max((largest_of(gradient) for gradient in wide.values()), default=0.0)
    losses = []
    for parameter, gradient in as_it_ran.gradients:
        other = wide.get(id(parameter))
        if other is None or other.shape != gradient.shape:
            continue
        present = what_counts(other, floor)
        name = names.get(id(parameter)) or tensor_called(parameter)
        lost = int((present & (gradient == 0)).sum())
        losses.append(Loss(name, lost, int(present.sum()), parameter.dim() > 1))
    return losses


def share_of_lost(in_float32: Outcome, names: dict[int, str], outcome: Outcome) -> float:
    """Of all gradient elements that count, the share that is 0 in another replay."""
    losses = lost_gradients(outcome, in_float32, names)
    return sum(loss.lost for loss in losses) / max(sum(loss.present for loss in losses), 1)


def what_counts(gradient: Tensor, floor: float) -> Tensor:
    """Where a gradient of float32 is more than nothing beside its largest element, and that more than `floor`.

    A classifier that is sure of nearly all samples has gradients of 1e-30 there, beside 1 for those that it has wrong:
    float16 has 0 for them, and nothing is lost by that.
    """
    top = largest_of(gradient)
    return gradient.abs() > (NEGLIGIBLE * top if top > floor else top)


def largest_of(gradient: Tensor) -> float:
    return float(gradient.abs().max()) if gradient.numel() else 0.0


def distances_from(in_float32: Outcome, outcome: Outcome, factor: float = 1.0) -> dict[int, float]:
    """By parameter: how far its gradient is from float32's, in lengths of that. `factor`: by how much it is scaled more."""
    wide = {id(parameter): gradient for parameter, gradient in in_float32.gradients}
    found = {}
    for parameter, gradient in outcome.gradients:
        true = wide.get(id(parameter))
        if true is not None and true.shape == gradient.shape and (length := float(true.double().norm())) > 0:
            found[id(parameter)] = float((gradient.double() / factor - true.double()).norm()) / length
    return found


def distant_gradients(
    replayer: Replayer, as_it_ran: Outcome, in_float32: Outcome
) -> tuple[dict[int, float], float] | None:
    """The parameters whose gradients are far from float32's only for want of a loss scale, and the factor that saves them.

    None where they are few; where float32 is no better than its own rounding; where no scale helps: then it is not the
    range that they lack.
    """
    far = {key: off for key, off in distances_from(in_float32, as_it_ran).items() if off >= LOST_DISTANCE}
    sizes = {id(parameter): parameter.numel() for parameter, _ in as_it_ran.gradients}
    needed = LOST_SHARE * sum(sizes.values())
    if sum(sizes[key] for key in far) < needed:
        return None
    in_float64 = replayer.run(Variant(convert=torch.float64), traced=False)
    if not agree(in_float32.loss, in_float64.loss):
        return None
    exact = distances_from(in_float64, in_float32)
    far = {key: off for key, off in far.items() if exact.get(key, 1.0) <= SAVED * off}
    if sum(sizes[key] for key in far) < needed:
        return None
    for factor in SCALES:
        outcome = replayer.run(Variant(loss_scale_factor=factor), traced=False)
        left = {} if outcome.is_bad else distances_from(in_float32, outcome, factor)
        if left and all(left.get(key, 1.0) <= SAVED * off for key, off in far.items()):
            return far, factor
    return None


def is_rounding(as_it_ran: Outcome, in_float32: Outcome, in_float64: Outcome) -> bool:
    """Whether float64 bears out hardly any of the lost gradients: they cancel to 0, and float32 has but its rounding there.

    A parameter that changes nothing has such a gradient (a bias before a BatchNorm), and all have it where every sample
    is the same. Not known, and so no, where the steps differ by more than their precision.
    """
    if not agree(in_float32.loss, in_float64.loss):
        return False
    flushed = {id(parameter): gradient for parameter, gradient in as_it_ran.gradients}
    floor = NEGLIGIBLE**2 * max((largest_of(gradient) for _, gradient in in_float32.gradients), default=0.0)
    exact = {id(parameter): gradient for parameter, gradient in in_float64.gradients}
    lost = borne_out = 0
    for parameter, wide in in_float32.gradients:
        own, true = flushed.get(id(parameter)), exact.get(id(parameter))
        if own is None or true is None or not own.shape == wide.shape == true.shape:
            continue
        is_lost = what_counts(wide, floor) & (own == 0)
        lost += int(is_lost.sum())
        borne_out += int((is_lost & ((wide - true).abs() <= true.abs() / 2)).sum())
    return borne_out < LOST_SHARE * lost


def agree(loss: float | None, other: float | None) -> bool:
    """Whether two losses are the same step's."""
    return loss is not None and other is not None and math.isclose(loss, other, rel_tol=1e-3, abs_tol=1e-6)


def saving_scale(replayer: Replayer, in_float32: Outcome, names: dict[int, str], scale: float) -> float | None:
    """The first of the loss scales tried at which hardly anything is flushed and nothing overflows."""
    for factor in SCALES:
        outcome = replayer.run(Variant(loss_scale_factor=factor), traced=False)
        if outcome.is_bad:
            continue
        losses = lost_gradients(outcome, in_float32, names)
        if sum(loss.lost for loss in losses) <= SAVED_SHARE * sum(loss.present for loss in losses):
            return scale * factor
    return None


def first_flush(as_it_ran: Outcome, in_float32: Outcome) -> TracedOp | None:
    """The first operator of the backward pass that flushes a large share of what it has in float32."""
    for op in as_it_ran.trace.ops:
        share = as_it_ran.zero_shares.get(op.index)
        if not op.in_backward or share is None or share < LOST_SHARE:
            continue
        twin = in_float32.trace.aligned(op) if op.key else None
        other = in_float32.zero_shares.get(twin.index) if twin is not None else _before(as_it_ran, op)
        if other is not None and share - other >= LOST_SHARE * (1 - other) and not math.isclose(other, 1.0):
            return op
    return None


def _before(outcome: Outcome, op: TracedOp) -> float | None:
    """For a cast, which has no twin in float32: the zeros in its operand."""
    made = op.inputs[0].made_by if op.inputs else None
    return outcome.zero_shares.get(made[0]) if made is not None else None
