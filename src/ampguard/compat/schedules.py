"""How long the schedule of a learning rate is, as PyTorch's schedulers keep it."""

from __future__ import annotations

from typing import Any

LENGTHS = ("total_steps", "total_size", "T_0", "T_max", "total_iters")
"""Of one cycle, of a cycle that comes back, of annealing with restarts and without, of a warm-up or a decay."""


def schedule_length(scheduler: Any) -> float | None:
    """The moves that a scheduler is made for, or those of its first cycle; None where it does not say."""
    parts = list(getattr(scheduler, "_schedulers", ()))
    milestones = getattr(scheduler, "_milestones", None)
    if parts and milestones:
        last = schedule_length(parts[-1])
        return milestones[-1] + last if last is not None else None
    if parts:
        known = [length for part in parts if (length := schedule_length(part)) is not None]
        return max(known, default=None)
    found = (getattr(scheduler, name, None) for name in LENGTHS)
    return next((float(n) for n in found if isinstance(n, (int, float)) and n > 0), None)


def warm_up_length(scheduler: Any) -> float | None:
    """The moves of its first part, in which the rate rises as a rule; None where it has no parts."""
    milestones = getattr(scheduler, "_milestones", None)
    if milestones:
        return float(milestones[0])
    phases = getattr(scheduler, "_schedule_phases", None)
    if isinstance(phases, list) and phases and isinstance(phases[0], dict) and "end_step" in phases[0]:
        return float(phases[0]["end_step"]) + 1.0
    return None
