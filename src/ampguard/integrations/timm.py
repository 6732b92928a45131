"""The scaler that MAE, Swin, SimMIM and VMamba call once per batch, and timm's: the same calls, over the engine.

    from ampguard.integrations.timm import NativeScalerWithGradNormCount as NativeScaler   # MAE, Swin, SimMIM, VMamba
    from ampguard.integrations.timm import NativeScaler                                    # timm

Nothing else in their scripts changes. docs/integrations/mae-swin-timm.md says what is gained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampguard import compat
from ampguard.engine.own_loop import LoopPrecision, device_type_of
from ampguard.engine.result import StepResult
from ampguard.engine.setup import parameters_of
from ampguard.engine.step import check_gradients
from ampguard.errors import SetupError
from ampguard.integrations.clipping import MODES, clip_
from ampguard.integrations.scaler import PATIENCE, EngineScaler
from ampguard.integrations.updating import refuse_closures

__all__ = ["NativeScaler", "NativeScalerWithGradNormCount"]

Parameters = Tensor | Iterable[Tensor] | None


class _OneCall:
    """Scale, backward, unscale, clip, step and update in one call, or only scale and backward inside a window."""

    state_dict_key = "amp_scaler"

    def __init__(
        self,
        device: str | torch.device | None = None,
        precision: str | LoopPrecision = "fp16",
        *,
        init_scale: float = 2.0**16,
        growth_interval: int = 2000,
        patience: int | None = PATIENCE,
    ) -> None:
        """`device` is timm's argument, and not needed: the loss says where it is."""
        if device is not None:
            device_type_of(device)
        self._scaler = EngineScaler(
            precision, init_scale=init_scale, growth_interval=growth_interval, patience=patience
        )

    @property
    def result(self) -> StepResult:
        """What the last step did: `result.skipped` tells a scheduler to wait."""
        return self._scaler.result

    def get_scale(self) -> float:
        """The loss scale; 1 where there is none."""
        return self._scaler.get_scale()

    def state_dict(self) -> dict[str, Any]:
        """GradScaler's keys, as these projects' checkpoints hold them."""
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Also what their own scalers have saved."""
        self._scaler.load_state_dict(state_dict)

    def _call(
        self,
        loss: Tensor,
        optimizer: Optimizer,
        clip_grad: float | None,
        clip_mode: str,
        parameters: Parameters,
        create_graph: bool,
        ends_window: bool,
    ) -> Tensor | None:
        if clip_mode not in MODES:
            raise SetupError(f"unknown clip_mode {clip_mode!r}: it is one of {', '.join(map(repr, MODES))}")
        if not hasattr(optimizer, "param_groups"):
            raise SetupError(f"a {type(optimizer).__name__} is no optimizer\n  do    loss_scaler(loss, optimizer, ...)")
        refuse_closures(optimizer, "this scaler")
        if clip_grad and not (isinstance(clip_grad, Tensor) or (_is_number(clip_grad) and clip_grad > 0)):
            raise SetupError(f"clip_grad={clip_grad!r}: a number above 0; None for no clipping")
        own = _of_optimizer(optimizer, parameters, self._scaler.precision) if ends_window else None
        self._scaler.backward(loss, optimizer, create_graph=create_graph)
        if not ends_window:
            return None
        norm = self._step(optimizer, clip_grad or None, clip_mode, own)
        self._scaler.update()
        return norm

    def _step(self, optimizer: Optimizer, limit: float | None, mode: str, own: Sequence[Tensor] | None) -> Tensor:
        """`own`: those of the optimizer's parameters that are measured and clipped; None: all of them."""
        gradients = [p for p in parameters_of(optimizer) if p.grad is not None]
        chosen = [p for p in own if p.grad is not None] if own is not None else gradients
        if len(chosen) == len(gradients) and (mode == "norm" or limit is None):
            self._scaler.step(optimizer, max_norm=limit, wants_norm=True)
            return _known(self._scaler.norm)
        norm = self._scaler.unscale_(optimizer)
        if len(chosen) < len(gradients):
            norm = _known(check_gradients(chosen).norm)
        if limit is not None and chosen:
            clip_(chosen, limit, mode)
        self._scaler.step(optimizer)
        return norm


class NativeScalerWithGradNormCount(_OneCall):
    """MAE's, Swin's, SimMIM's and VMamba's; takes timm's words too."""

    def __call__(
        self,
        loss: Tensor,
        optimizer: Optimizer,
        clip_grad: float | None = None,
        parameters: Parameters = None,
        create_graph: bool = False,
        update_grad: bool = True,
        *,
        clip_mode: str = "norm",
        need_update: bool = True,
    ) -> Tensor | None:
        """The norm of the true gradients before clipping, a 0-d tensor; None inside an accumulation window.

        `parameters` (default: the optimizer's) are clipped and measured, as far as the optimizer updates them. As the
        original, it neither divides the loss by the length of the window nor clears gradients.
        """
        ends_window = update_grad and need_update
        return self._call(loss, optimizer, clip_grad, clip_mode, parameters, create_graph, ends_window)


class NativeScaler(_OneCall):
    """timm's, which clips by `clip_mode`: "norm", "value" or "agc". Returns the norm, where timm's returns nothing."""

    def __call__(
        self,
        loss: Tensor,
        optimizer: Optimizer,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: Parameters = None,
        create_graph: bool = False,
        need_update: bool = True,
        *,
        update_grad: bool = True,
    ) -> Tensor | None:
        """As `NativeScalerWithGradNormCount`, in the order of timm's arguments."""
        ends_window = update_grad and need_update
        return self._call(loss, optimizer, clip_grad, clip_mode, parameters, create_graph, ends_window)


def _of_optimizer(optimizer: Optimizer, parameters: Parameters, precision: LoopPrecision) -> list[Tensor] | None:
    """What the optimizer updates of the parameters: in O2 their master weights; None where none were named.

    A flat buffer of the optimizer's counts as a whole where they lie in it. Raises SetupError where it updates none of them.
    """
    if parameters is None:
        return None
    named = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    given = {id(p) for p in named}
    updated = parameters_of(optimizer)
    own = [p for p in updated if id(p) in given or id(precision.weight_of(p)) in given]
    if not own:
        memory = {compat.storage_key(p) for p in named if isinstance(p, Tensor)} - {0}
        own = [p for p in updated if compat.storage_key(p) in memory]
    if not own:
        raise _of_another(optimizer, named)
    return own


def _of_another(optimizer: Optimizer, named: Sequence[object]) -> SetupError:
    name = type(optimizer).__name__
    if not named:
        return SetupError(
            f"parameters= is empty: there is nothing to measure or to clip of `{name}`\n"
            "  why   an iterator that was used up before, say model.parameters() kept in a variable, gives nothing more\n"
            "  do    parameters=model.parameters() in each call; or leave it out: then it is all that the optimizer updates"
        )
    return SetupError(
        f"`{name}` updates none of the {len(named)} given as parameters=: their gradients cannot be measured or clipped\n"
        "  why   they are another model's, or the model was moved, copied or rebuilt after the optimizer was made\n"
        "  do    parameters=model.parameters() of the model that it trains; or leave it out: then it is all that it updates"
    )


def _is_number(given: object) -> bool:
    return isinstance(given, (int, float))


def _known(norm: Tensor | None) -> Tensor:
    assert norm is not None
    return norm
