"""What optimizers step with: the numbers in their parameter groups. Ranks that train one model should have the same."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

MOST_GROUPS = 16
"""Of an optimizer: some give each layer a group of its own."""


def settings_of(optimizers: Iterable[Optimizer]) -> dict[str, float]:
    """Each finite number of their parameter groups, by where it stands: `AdamW.param_groups[0]["lr"]`. Waits for no device.

    >>> import torch
    >>> found = settings_of([torch.optim.SGD([torch.ones(1)], lr=0.5)])
    >>> found['SGD.param_groups[0]["lr"]'], found['SGD.param_groups[0]["nesterov"]']
    (0.5, 0.0)
    >>> [name for name in found if "params" in name.removeprefix("SGD.param_groups")]
    []
    """
    found: dict[str, float] = {}
    names: dict[str, int] = {}
    for optimizer in {id(optimizer): optimizer for optimizer in optimizers}.values():
        name = type(optimizer).__name__
        names[name] = names.get(name, 0) + 1
        whose = name if names[name] == 1 else f"{name} (number {names[name]})"
        for number, group in enumerate(optimizer.param_groups[:MOST_GROUPS]):
            for key, value in group.items():
                if key == "params":
                    continue  # one of them may be a single number, too
                numbers = _numbers_in(value)
                for place, part in enumerate(numbers):
                    where = f"[{place}]" if isinstance(value, (tuple, list)) else ""
                    if math.isfinite(part):  # JSON has no others
                        found[f'{whose}.param_groups[{number}]["{key}"]{where}'] = part
    return found


def differing_setting(mine: dict[str, float], theirs: dict[str, float]) -> tuple[str, float, float] | None:
    """The setting that differs, with both values; of several a learning rate. None where the two do not have the same ones.

    >>> differing_setting({"lr": 0.1, "eps": 1e-8}, {"lr": 0.2, "eps": 1e-8})
    ('lr', 0.1, 0.2)
    """
    if mine.keys() != theirs.keys():
        return None
    differing = [(name, value, theirs[name]) for name, value in mine.items() if value != theirs[name]]
    return min(differing, key=lambda found: not is_learning_rate(found[0]), default=None)


def is_learning_rate(setting: str) -> bool:
    """Whether it is the rate that is stepped with (`initial_lr` is what it began with)."""
    return setting.endswith('["lr"]')


def _numbers_in(value: Any) -> list[float]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    if any(isinstance(part, Tensor) for part in values):
        values = [part.item() for part in values if isinstance(part, Tensor) and part.is_cpu and part.numel() == 1]
    return [float(part) for part in values if isinstance(part, (int, float))]
