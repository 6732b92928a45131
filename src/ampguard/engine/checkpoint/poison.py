"""What in a state is not finite, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ampguard.engine.checkpoint.seal import leaves
from ampguard.errors import PoisonedStateError
from ampguard.numerics import is_finite


def nonfinite_leaves(parts: Mapping[str, Any]) -> list[str]:
    """Paths of the floating tensors that hold NaN or Inf. Waits for the device."""
    return [path for path, leaf in leaves(parts) if isinstance(leaf, Tensor) and not is_finite(leaf)]


def refuse_poisoned(parts: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise PoisonedStateError; `known` are tensors that were not finite when training began (masks of -Inf)."""
    bad = [path for path in nonfinite_leaves(parts) if path not in set(known)]
    if not bad:
        return
    shown = ", ".join(f"`{path}`" for path in bad[:4]) + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")
    raise PoisonedStateError(
        f"the state is not saved: {shown} hold NaN or Inf\n"
        "  why   something has updated them with values that are not finite: a step outside amp.step(), or a forward "
        "pass that keeps statistics\n"
        "  do    go on from the last checkpoint, with on_nonfinite='rollback'; `ampguard run` says where it began"
    )
