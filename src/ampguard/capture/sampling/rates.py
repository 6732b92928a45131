"""The learning rate that an optimizer's group holds: a number, a tensor of one, or of one for each of its models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def rate_of_group(group: Mapping[str, Any]) -> float:
    """Its largest; 0 where it has none, or one that is no number. Waits for the device of a tensor."""
    return rate_of(group.get("lr"))


def rate_of(rate: object) -> float:
    """The same of what stands there."""
    if isinstance(rate, Tensor):
        return float(rate.detach().amax()) if rate.numel() else 0.0
    return float(rate) if isinstance(rate, (int, float)) else 0.0


def rate_of_optimizer(optimizer: Optimizer) -> float:
    """The largest learning rate of the groups; 0 where there is none."""
    return max((rate_of_group(group) for group in optimizer.param_groups), default=0.0)
