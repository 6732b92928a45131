"""What was done to a model between the building of its optimizer and the first step: layers put in, layers unfrozen.

The optimizer knows nothing of either: adapters (LoRA) that are put around layers, a head, a part that was frozen when
`filter(lambda p: p.requires_grad, ...)` was asked. Modules that were made beside it are another matter: only what has
come into one of which the optimizer holds parameters is noted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import FrameType

from torch import Tensor, nn
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.protocol.script_objects import modules_in_frames

MAX_OPTIMIZERS = 16
MAX_NOTED = 4096


class BuiltFrom:
    """Asked once, at the first step; deaf from then on."""

    def __init__(self) -> None:
        self._models: list[weakref.ref[nn.Module]] = []
        self._frozen: list[weakref.ref[Tensor]] = []
        self._made: list[tuple[weakref.ref[Tensor], int]] = []
        """Parameters of modules, each with the number of models that were known when it was made."""
        self._optimizers = 0
        self.is_open = True

    def optimizer_made(self, optimizer: Optimizer, frame: FrameType | None) -> None:
        """Note the models of which it holds parameters, and what of them is frozen."""
        if not self.is_open or self._optimizers >= MAX_OPTIMIZERS:
            return
        self._optimizers += 1
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        known = {id(m) for ref in self._models if (m := ref()) is not None}
        for module in {id(m): m for m in modules_in_frames(frame)}.values():
            inside = compat.all_parameters(module) if id(module) not in known else []
            if any(id(p) in held for p in inside):
                self._models.append(weakref.ref(module))
                self._frozen += [weakref.ref(p) for p in inside if not p.requires_grad and p.is_leaf]

    def registered(self, parameter: object) -> None:
        """A module is given a parameter."""
        if self.is_open and self._models and isinstance(parameter, Tensor) and len(self._made) < MAX_NOTED:
            self._made.append((weakref.ref(parameter), len(self._models)))

    def close(self) -> tuple[list[weakref.ref[Tensor]], set[int]]:
        """What was frozen and what was not there when the optimizers were built; of the latter the identities."""
        self.is_open = False
        made = {id(p): p for p in self._put_in()}
        frozen = {id(p): p for ref in self._frozen if (p := ref()) is not None}
        self._frozen, self._made, self._models = [], [], []
        return [weakref.ref(p) for p in list((frozen | made).values())[:MAX_NOTED]], set(made)

    def _put_in(self) -> Iterator[Tensor]:
        """What has come into a model after that one was noted."""
        inside = [
            {id(p) for p in compat.all_parameters(m)} if (m := ref()) is not None else set() for ref in self._models
        ]
        for ref, known in self._made:
            parameter = ref()
            if parameter is not None and any(id(parameter) in ids for ids in inside[:known]):
                yield parameter
