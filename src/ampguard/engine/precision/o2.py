"""O2: a float16 model, norms in float32, float32 master weights, a dynamic loss scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampguard import compat
from ampguard.engine.casting import is_castable
from ampguard.engine.force_fp32.modules import ForcedModules
from ampguard.engine.precision.base import Precision
from ampguard.engine.precision.late_optimizers import note_cast
from ampguard.engine.precision.masters import Masters
from ampguard.engine.precision.weights import LowWeights, norms_in, parametrizations_in
from ampguard.engine.step import GradientCheck
from ampguard.errors import CheckpointError, ProtocolError


class O2(Precision):
    """Half the memory traffic of autocast, which casts the weights in every step; updates as exact as float32's."""

    name = "O2"
    weights_dtype = torch.float16
    keeps_masters = True
    scales_loss = True
    takes_closures = False

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type)
        self._masters: Masters | None = None

    def convert(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], in_fp32: Sequence[nn.Module]
    ) -> None:
        norms = {f"norm {i}": m for i, m in enumerate(n for model in models for n in norms_in(model))}
        ForcedModules(norms)
        kept = [*in_fp32, *norms.values()]
        without_masters = [*kept, *parametrizations_in(models)]
        to_cast = _castable(models) - {id(p) for module in without_masters for p in compat.all_parameters(module)}
        self._masters = Masters(optimizers, to_cast)
        self.low_weights = LowWeights(models, self.weights_dtype, kept)
        self._masters.note()
        note_cast(p for model in models for p in compat.all_parameters(model) if id(p) in to_cast)

    def before_forward(self) -> None:
        if self._masters is not None:
            self._masters.follow_model()
            self._masters.follow_masters()

    def before_reading(self) -> None:
        if self._masters is not None:
            self._masters.follow_masters()

    def before_backward(self) -> None:
        if self._masters is not None:
            self._masters.follow_model()

    def average_first(self, wrappers: Sequence[nn.parallel.DistributedDataParallel]) -> None:
        if self._masters is not None:
            self._masters.average_by(wrappers)

    def after_backward(self) -> None:
        if self._masters is not None:
            self._masters.take_averaged()

    def cleared(self, optimizer: Optimizer) -> None:
        if self._masters is not None:
            self._masters.forget_unaveraged(optimizer)

    def apply(self, optimizer: Optimizer, check: GradientCheck, max_norm: float | None) -> None:
        self.before_update(optimizer)
        super().apply(optimizer, check, max_norm)
        self.copy_to_model(optimizer)

    def before_update(self, optimizer: Optimizer) -> None:
        """Its masters are about to be updated, and then rounded into the model: follow what was written there until now."""
        if self._masters is not None:
            self._masters.follow_model(optimizer)

    def copy_to_model(self, optimizer: Optimizer) -> None:
        """Round the updated master weights into the model."""
        if self._masters is not None:
            self._masters.copy_to_model(optimizer)

    def parameter_of(self, held: Tensor) -> Tensor:
        return held if self._masters is None else self._masters.model_weight(held)

    def state_dict(self) -> dict[str, Any]:
        return {"masters": self._masters.state() if self._masters is not None else []}

    def check_state(self, state: Mapping[str, Any]) -> None:
        saved, own = state.get("masters"), self.state_dict()["masters"]
        are_tensors = isinstance(saved, (list, tuple)) and all(isinstance(t, Tensor) for t in saved)
        if saved is None or not are_tensors or [t.shape for t in saved] != [t.shape for t in own]:
            raise CheckpointError("the checkpoint was not loaded: its float32 master weights are missing or others")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._masters is not None:
            self._masters.load(state["masters"])

    def refuse_direct_step(self, name: str) -> None:
        raise ProtocolError(
            f"optimizer.step() of `{name}` in O2: it would update the master weights, and not the model\n"
            "  do    call amp.step(optimizer) instead   (ampguard explain bypassed-scaler)",
            "bypassed-scaler",
        )

    def master_of(self, weight: Tensor) -> Tensor | None:
        return self._masters.present(weight) if self._masters is not None else None


def _castable(models: Sequence[nn.Module]) -> set[int]:
    return {id(p) for model in models for p in compat.all_parameters(model) if is_castable(p)}
