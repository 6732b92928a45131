"""Which operators autocast runs in low precision, and whether there is a region."""

from __future__ import annotations

from typing import Any

import torch

from ampguard import compat

CAST_BY_AUTOCAST = (
    "mm",
    "mv",
    "bmm",
    "addmm",
    "addmv",
    "addr",
    "baddbmm",
    "addbmm",
    "conv",
    "linear",
    "prelu",
    "scaled_dot",
)
"""How the names of operators begin that autocast runs in low precision, whatever they are given."""

_known: dict[Any, bool] = {}


def is_cast_by_autocast(func: Any) -> bool:
    """Whether autocast casts what this ATen operator is given to low precision. A function in place of operators is none."""
    known = _known.get(func)
    if known is None:
        try:
            name = compat.schema_of(func).name.split("::")[-1].lstrip("_")
        except AttributeError:
            name = ""
        known = _known[func] = name.startswith(CAST_BY_AUTOCAST) and not name.endswith("_")
    return known


def cast_types_within(func: Any) -> tuple[tuple[str, torch.dtype], ...]:
    """While a dispatch mode of ours is told of an operator whose kernel autocast casts: the devices for which it is on, and
    its type there."""
    if not compat.casts_within(func):
        return ()
    return tuple((device, torch.get_autocast_dtype(device)) for device in compat.devices_that_cast())


def is_in_region() -> bool:
    """Whether this thread is within some region of autocast, switched on or off.

    Inside an operator that autocast runs in low precision it is out of sight whether the region is switched on: its own
    dispatch key is excluded there.
    """
    depth: int = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth > 0
