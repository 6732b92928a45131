"""Where a tensor stands in the batch that a DataLoader gave."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ampguard import compat


def name_in(batch: Any, tensor: Tensor) -> str | None:
    """`batch[1]`, `batch['labels']`: where a tensor stands in a batch; None where it does not."""
    stack: list[tuple[str, Any]] = [("batch", batch)]
    while stack:
        name, item = stack.pop()
        item = item() if isinstance(item, weakref.ref) else item
        if isinstance(item, Tensor):
            if item is tensor or compat.storage_key(item) == compat.storage_key(tensor) != 0:
                return name
        elif isinstance(item, Mapping):
            stack.extend((f"{name}[{key!r}]", value) for key, value in item.items())
        elif isinstance(item, (list, tuple)):
            fields = getattr(item, "_fields", None) or [None] * len(item)
            named = (f"{name}.{field}" if field else f"{name}[{i}]" for i, field in enumerate(fields))
            stack.extend(zip(named, item, strict=True))
        elif item is not None:  # a dataclass, or a collection of the script's own
            parts = getattr(item, "__dict__", {}).items()
            stack.extend((f"{name}.{key}", value) for key, value in parts if isinstance(value, (Tensor, weakref.ref)))
    return None
