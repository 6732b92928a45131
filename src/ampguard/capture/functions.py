"""Custom `torch.autograd.Function`s applied outside every module.

Taped operator by operator they would lose their own backward; so each is recorded as one call, in a module of ours.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class Applied(nn.Module):
    """A custom function as a module, so that its calls are recorded and run again like any other."""

    def __init__(self, function: type) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)  # type: ignore[attr-defined]


class AppliedFunctions:
    """One module for each function in use."""

    def __init__(self) -> None:
        self._known: dict[type, Applied] = {}

    def module_of(self, function: type) -> Applied:
        known = self._known.get(function)
        if known is None:
            known = self._known[function] = Applied(function)
        return known
