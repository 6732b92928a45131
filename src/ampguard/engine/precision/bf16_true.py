"""bfloat16 weights; updates are computed in float32 and rounded so that small ones are not lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.optim import Optimizer

from ampguard.engine.precision.base import Precision
from ampguard.engine.precision.weights import LowWeights
from ampguard.engine.step import GradientCheck, RoundedUpdate
from ampguard.errors import CheckpointError, ProtocolError, SetupError

ROUNDINGS = ("stochastic", "kahan", "nearest")


class Bf16True(Precision):
    """Half the memory of float32 weights.

    `rounding`: "stochastic" (nothing beside the weights), "kahan" (what was rounded off is kept in bfloat16), or
    "nearest", as plain PyTorch does: an update below 1/256 of a weight is lost then. `seed`: of the stochastic rounding.
    """

    name = "bf16-true"
    weights_dtype = torch.bfloat16
    takes_closures = False

    def __init__(self, device_type: str, rounding: str = "stochastic", seed: int = 0) -> None:
        super().__init__(device_type)
        if rounding not in ROUNDINGS:
            raise SetupError(f"unknown rounding={rounding!r}\n  do    use one of {', '.join(map(repr, ROUNDINGS))}")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise SetupError(f"seed={seed!r} of the rounding is a {type(seed).__name__}, not a whole number")
        self.rounding = rounding
        self._seed = seed
        self._roundings: dict[int, RoundedUpdate] = {}

    def convert(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], in_fp32: Sequence[nn.Module]
    ) -> None:
        self.low_weights = LowWeights(models, self.weights_dtype, in_fp32)
        if self.rounding != "nearest":
            how = cast(Literal["stochastic", "kahan"], self.rounding)
            self._roundings = {id(o): RoundedUpdate(o, how, self._seed + i) for i, o in enumerate(optimizers)}

    def apply(self, optimizer: Optimizer, check: GradientCheck, max_norm: float | None) -> None:
        rounding = self._roundings.get(id(optimizer))
        if rounding is None:
            super().apply(optimizer, check, max_norm)
        else:
            rounding.apply(check, max_norm)

    def refuse_direct_step(self, name: str) -> None:
        if self._roundings:
            raise ProtocolError(
                f"optimizer.step() of `{name}` in bf16-true: it would round to nearest, and lose small updates\n"
                "  do    call amp.step(optimizer) instead   (ampguard explain lost-update)",
                "lost-update",
            )

    def state_dict(self) -> dict[str, Any]:
        return {"rounding": self.rounding, "roundings": [r.state_dict() for r in self._roundings.values()]}

    def check_state(self, state: Mapping[str, Any]) -> None:
        if state.get("rounding") != self.rounding or len(state.get("roundings", ())) != len(self._roundings):
            raise CheckpointError(
                f"the checkpoint was not loaded: it was made with rounding={state.get('rounding')!r}, this Amp has "
                f"{self.rounding!r}\n  do    make Amp with that rounding"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for rounding, saved in zip(self._roundings.values(), state["roundings"], strict=True):
            rounding.load_state_dict(saved)
