"""What the command line asks for, checked before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ampguard.errors import UsageError

OnNonfinite = Literal["observe", "stop", "skip", "heal"]
"""What happens when a loss or gradients are not finite."""

PRECISIONS = ("fp32", "fp16", "bf16", "O2", "O3", "bf16-true")
AUTOCAST = ("fp32", "fp16", "bf16")
"""Those that leave the weights as they are."""
LEVELS = {"O0": "fp32", "O1": "fp16", "O2": "O2", "O3": "O3", "bf16": "bf16"}
"""apex's and Swin's names. O1 is autocast."""


@dataclass(frozen=True)
class Overrides:
    """What is to be different from what the script says. `precision` None: nothing of it."""

    precision: str | None = None
    force_fp32: tuple[str, ...] = ()
    compare_eval: tuple[str, ...] = ()
    """Precisions in which evaluation calls are made again, to be compared."""


def overrides_of(
    precision: str | None,
    level: str | None,
    disable_amp: bool,
    force_fp32: tuple[str, ...],
    compare_eval: tuple[str, ...] = (),
) -> Overrides | None:
    """The overrides that some options ask for; None where none is asked for.

    Raises UsageError where they contradict each other.
    """
    asked = {
        f"--precision {precision}": precision,
        f"--amp-opt-level {level}": LEVELS[level] if level is not None else None,
        "--disable-amp": "fp32" if disable_amp else None,
    }
    given = {option: name for option, name in asked.items() if name is not None}
    if len(set(given.values())) > 1:
        raise UsageError(f"{' and '.join(given)} contradict each other; give one of them")
    name = next(iter(given.values()), None)
    if "" in force_fp32:
        raise UsageError("--force-fp32 '': an empty pattern; for the whole model, --precision fp32")
    option = next((pattern for pattern in force_fp32 if pattern.startswith("-")), None)
    if option is not None:
        raise UsageError(f"--force-fp32 {option}: a pattern of modules is missing, say --force-fp32 'blocks.*.attn'")
    if not (name is not None or force_fp32 or compare_eval):
        return None
    return Overrides(name, force_fp32, compare_eval)
