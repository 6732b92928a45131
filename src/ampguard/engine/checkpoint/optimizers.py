"""The states of optimizers: PyTorch's, whose tensors keep their types, and those of wrappers with a format of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ampguard.engine.setup import parameters_of
from ampguard.errors import CheckpointError


def state_of(name: str, optimizer: Optimizer) -> dict[str, Any]:
    """Raises CheckpointError for a wrapper that has none: PyTorch's `state_dict` needs what `super().__init__` makes."""
    try:
        return optimizer.state_dict()
    except Exception as error:  # the loop's own code
        raise CheckpointError(
            f"`{name}` has no state to save: {type(optimizer).__name__}.state_dict() raised {type(error).__name__}: {error}\n"
            "  do    define state_dict() and load_state_dict() in that class, or have its __init__ call super().__init__"
        ) from error


def has_own_format(state: Mapping[str, Any]) -> bool:
    """Whether only the optimizer itself can read it."""
    return not {"state", "param_groups"} <= state.keys()


def load_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """`optimizer.load_state_dict`, with the types of the saved state: PyTorch casts it to those of the parameters."""
    if has_own_format(saved):
        optimizer.load_state_dict(dict(saved))
        return
    optimizer.load_state_dict({"state": saved["state"], "param_groups": saved["param_groups"]})
    for number, parameter in enumerate(parameters_of(optimizer)):
        entries = saved["state"].get(number, {})
        for key, value in entries.items():
            now = optimizer.state[parameter].get(key)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor):
                optimizer.state[parameter][key] = value.to(now.device, copy=True)
