"""Weights as an optimizer's last step has left them: has anybody written to them since?

Scripts lend averaged weights to a model before it is evaluated, and put its own back behind that. One parameter of each
optimizer stands for all: PyTorch counts each write to it.
"""

from __future__ import annotations

import weakref

from torch import Tensor
from torch.optim import Optimizer

from ampguard.compat import version_of


class UpdatedWeights:
    """By optimizer, one of its parameters and its version behind the last step."""

    def __init__(self) -> None:
        self._left: weakref.WeakKeyDictionary[Optimizer, tuple[weakref.ref[Tensor], int]] = weakref.WeakKeyDictionary()

    def note(self, optimizer: Optimizer) -> None:
        """It has stepped, or was about to and was held off."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._left[optimizer] = weakref.ref(parameter), version_of(parameter)
                return

    def were_written(self) -> bool:
        """Whether somebody has written to the weights of any of these since."""
        pairs = ((ref(), version) for ref, version in self._left.values())
        return any(parameter is not None and version_of(parameter) > version for parameter, version in pairs)
