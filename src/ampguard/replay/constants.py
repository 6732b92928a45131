"""Tensors that modules read beside their arguments and their state: an attribute, a global, a variable of a closure."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ampguard.capture.root_calls.trees import map_tensors


class Replaced(TorchFunctionMode):
    """Every function of PyTorch's is called with other tensors in the place of some, told by identity."""

    def __init__(self, others: dict[int, Tensor]) -> None:
        super().__init__()
        self._others = others

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*map_tensors(tuple(args), self._other), **map_tensors(dict(kwargs or {}), self._other))

    def _other(self, tensor: Tensor) -> Tensor:
        return self._others.get(id(tensor), tensor)
