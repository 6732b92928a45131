"""scale-collapse: the loss scale fell and fell and nearly every step is skipped.

What happens   some gradient overflows at every scale that is tried. GradScaler halves the scale and skips the step,
               again and again: nothing is learned any more, and no error comes.
Why it hurts   the loss stays where it is, the run looks slow rather than broken. A scale below 1 even makes the
               gradients that are left smaller than they are.
Instead        cure what overflows (the incident names it where it was seen); bfloat16 needs no scale at all.
Not this       a few skipped steps at the start, or one every 2,000 steps: the scaler finding its scale.
"""

from __future__ import annotations

import math

from ampguard.diagnose.dynamics.finding import Situation, cause
from ampguard.diagnose.dynamics.trajectory import Trajectory
from ampguard.diagnose.words import number, spelled_out
from ampguard.incident import Fix, Incident

ITS_GRADIENTS = frozenset({"gradient-overflow", "loss-scale-overflow"})
"""Failures of which a collapse is made; any other that makes every step fail is told as itself."""

MIN_SKIPS = 8
SKIPPED_SHARE = 0.75
LOWEST_SANE_SCALE = 1.0
FALLEN = 2.0**10
GROWN = 4.0
"""By how much a scale may have grown since the last step that succeeded."""
SHOWN = 12


@cause("scale-collapse", asked=("step",))
def scale_collapse(situation: Situation) -> Incident | None:
    trajectory = situation.trajectory
    since, before = trajectory.falling_since, trajectory.scale_before
    if since is None or before is None or trajectory.skips_in_fall < MIN_SKIPS:
        return None
    if trajectory.bad_losses_in_fall > trajectory.skips_in_fall / 2:
        return None  # the loss itself is bad: that is the failure
    if trajectory.skips_in_fall < SKIPPED_SHARE * trajectory.attempts_in_fall:
        return None
    scale = next((v.scale for v in reversed(trajectory.recent) if v.scale is not None), None)
    if scale is None or not has_collapsed(trajectory, scale, before):
        return None
    known = situation.known
    if known is not None and known.cause not in ITS_GRADIENTS and is_behind(known, trajectory):
        return None  # what makes every step fail has been told: this is its consequence
    facts = {
        "since_step": since,
        "noticed_at_step": situation.step,
        "scale_before": before,
        "scale": scale,
        "skipped_steps": trajectory.skips_in_fall,
        "attempted_steps": trajectory.attempts_in_fall,
        "scales": [[step, s] for step, s, _ in list(trajectory.used_scales())[-SHOWN:]],
    }
    place = f" What overflows is {_what(known)}." if known is not None and known.op else ""
    return Incident(
        step=since,
        rank=situation.rank,
        mode="train",
        phase="backward",
        severity="error",
        cause="scale-collapse",
        module=known.module if known else None,
        op=known.op if known else None,
        dtype=known.dtype if known else "float16",
        location=known.location if known else None,
        explanation=(
            f"The loss scale has collapsed: since step {since} it fell from {number(before)} to "
            f"{number(scale)}, and {trajectory.skips_in_fall} of {trajectory.attempts_in_fall} steps were "
            f"skipped. {_losses(trajectory)}, gradients overflow at every scale that was tried, and nothing is learned.{place}"
        ),
        evidence={**(known.evidence if known else {}), **facts},
        fixes=fixes(known),
    )


def is_behind(known: Incident, trajectory: Trajectory) -> bool:
    """Whether most of the skipped steps were skipped for this failure, as far as failures were counted: later ones, of a run
    that goes on failing, are not looked at."""
    since, last = trajectory.falling_since or 0, known.evidence.get("last_step", math.inf)
    counted = sum(was_skipped and since <= step <= last for step, _, was_skipped in trajectory.used_scales())
    is_enough = counted >= min(MIN_SKIPS, trajectory.skips_in_fall / 2)
    return known.severity == "error" and is_enough and known.occurrences >= counted / 2


def _losses(trajectory: Trajectory) -> str:
    bad = trajectory.bad_losses_in_fall
    return f"In {bad} of these steps the loss was not finite itself; in the others" if bad else "The losses are finite"


def _what(known: Incident) -> str:
    """ "mm in the backward pass of blocks.0.attn"."""
    name = spelled_out((known.op or "").split(".")[1])
    where = "the root module" if known.module == "" else known.module
    return f"{name} in the backward pass of {where or 'what runs outside every module'}"


def fixes(known: Incident | None) -> tuple[Fix, ...]:
    """What cured the gradient when it was replayed; no other loss scale does."""
    tried = [f for f in known.fixes if f.action not in ("wait", "lower-loss-scale")] if known else []
    general = [
        Fix("use-bf16", None, "autocast in torch.bfloat16, which needs no loss scale, and drop the GradScaler"),
        Fix("clamp", None, "bound what overflows in backward: leave autocast there, or clamp its input"),
    ]
    return (*tried, *(fix for fix in general if all(fix.action != other.action for other in tried)))


def has_collapsed(trajectory: Trajectory, scale: float, before: float) -> bool:
    """Below 1; or far below where it was, after it had found its level (steps had succeeded at it)."""
    return scale < LOWEST_SANE_SCALE or (scale <= before / FALLEN and had_found(trajectory, before))


def had_found(trajectory: Trajectory, scale: float) -> bool:
    """Whether the last step before the fall that succeeded did so at about this scale: a new scaler begins far above it."""
    since = trajectory.falling_since or 0
    reached = [used for step, used, was_skipped in trajectory.used_scales() if step < since and not was_skipped]
    return bool(reached) and reached[-1] >= scale / GROWN
