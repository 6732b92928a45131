"""The values of `Amp`'s options: what each may be, and what is said where it is something else."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ampguard.engine.precision.base import Precision
from ampguard.engine.step.scale import MIN_SCALE
from ampguard.errors import SetupError

MAX_SCALE = torch.finfo(torch.float32).max


def made_mode(kind: type[Precision], device_type: str, options: Mapping[str, Any], known: Iterable[str]) -> Precision:
    """The mode, with options that only it has. `known`: the options of every mode, to name what was meant."""
    try:
        return kind(device_type, **options)
    except TypeError:
        shown = ", ".join(f"{name}=" for name in options)
        near = [found for name in options for found in difflib.get_close_matches(name, known, 1, 0.6)]
        meant = f"; nearest: {', '.join(f'{name}=' for name in near)}" if near else ""
        raise SetupError(
            f"precision {kind.name!r} takes no option {shown}{meant}\n  do    see docs/engine.md for its options"
        ) from None


def refuse_numbers(
    max_grad_norm: float | None, accumulate: int, patience: int | None, init_scale: float, growth_interval: int
) -> None:
    """Raises SetupError for what is no number, or none that makes sense."""
    may_be_none = {"max_grad_norm": max_grad_norm, "patience": patience}
    numbers = {"accumulate": accumulate, "init_scale": init_scale, "growth_interval": growth_interval}
    for name, given in (numbers | {name: given for name, given in may_be_none.items() if given is not None}).items():
        if isinstance(given, bool) or not isinstance(given, (int, float)):
            raise SetupError(f"{name}={given!r} is a {type(given).__name__}, not a number")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise SetupError(f"max_grad_norm={max_grad_norm} would stop all learning\n  do    leave it out for no clipping")
    if not MIN_SCALE <= init_scale <= MAX_SCALE:
        raise SetupError(
            f"init_scale={init_scale}: losses are multiplied by it in float32, so a number from {MIN_SCALE:.3g}, below which "
            f"the scale does not fall, to {MAX_SCALE:.3g}"
        )
    if not is_count(accumulate):
        raise SetupError(f"accumulate={accumulate}: a window has a whole number of micro-steps, at least 1")
    if not is_count(growth_interval):
        raise SetupError(f"growth_interval={growth_interval}: a whole number of steps, at least 1")
    if patience is not None and not is_count(patience):
        raise SetupError(f"patience={patience}: a whole number of skipped steps in a row, at least 1")


def is_count(number: float) -> bool:
    """Whether it is 1, 2, 3 and so on."""
    return math.isfinite(number) and number >= 1 and int(number) == number
