"""Accelerate's scaler over the engine: what `accelerator.scaler` is after `prepare(accelerator)`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampguard.engine.result import StepResult
from ampguard.engine.setup import parameter_names
from ampguard.errors import SetupError
from ampguard.integrations.losses import Losses
from ampguard.integrations.scaler import PATIENCE
from ampguard.integrations.shared_scaler import SharedScaler

NAMES = {"fp16": "fp16", "bf16": "bf16", "no": "fp32"}
"""Accelerate's precisions that the engine serves, by the engine's names."""


class AcceleratedScaler(SharedScaler):
    """Knows the optimizers of one `Accelerator`, and tells them truly whether a step was skipped."""

    def __init__(self, accelerator: Any, *, scales: bool = True, patience: int | None = PATIENCE) -> None:
        self._accelerator = accelerator
        super().__init__(
            NAMES[accelerator.mixed_precision] if scales else "fp32",
            optimizers=self._inner,
            backward_call="accelerator.backward(loss)",
            step_call="step() of the optimizer that accelerator.prepare() has returned",
            clip_call="accelerator.clip_grad_norm_ or accelerator.clip_grad_value_ instead of PyTorch's own",
            patience=patience,
        )
        self.losses = Losses()
        """The losses of `accelerator.backward`, and how many of them were not finite."""

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **words: Any) -> StepResult:
        self._learn_names(optimizer)
        result = super().step(optimizer, closure, **words)
        for wrapped in self._accelerator._optimizers:
            if inner(wrapped) is optimizer and hasattr(wrapped, "_accelerate_step_called") and result.skipped:
                wrapped._accelerate_step_called = False  # a fused optimizer is called, and skips by itself
        return result

    def _learn_names(self, optimizer: Optimizer) -> None:
        """Of the parameters, for messages."""
        own, models = self._of(optimizer), self._accelerator._models
        if models and not own.names:
            own.names = parameter_names({f"model {i}": model for i, model in enumerate(models)})
            self._model = models[0]

    def _inner(self) -> Iterator[Optimizer]:
        return map(inner, self._accelerator._optimizers)


def inner(optimizer: Any) -> Any:
    """The optimizer inside Accelerate's wrappers."""
    accelerated = importlib.import_module("accelerate.optimizer").AcceleratedOptimizer
    while isinstance(optimizer, accelerated):
        optimizer = optimizer.optimizer
    return optimizer


def install(accelerator: Any, patience: int | None) -> AcceleratedScaler:
    """Put the engine's scaler in the place of the accelerator's own. Raises SetupError where that cannot be right."""
    _refuse(accelerator)
    own = _own_scaler(accelerator) if accelerator.mixed_precision == "fp16" else None
    scaler = AcceleratedScaler(accelerator, scales=own is None or own.is_enabled(), patience=patience)
    if accelerator.mixed_precision == "fp16":
        if own is not None and own.is_enabled():
            scaler.take_over(own.state_dict())
        accelerator.native_amp = True  # Accelerate leaves it off on the CPU: float32 under the name of fp16
        accelerator.scaler = scaler
    for wrapped in accelerator._optimizers:
        _give(wrapped, scaler)
    _extend(accelerator, scaler)
    scaler.attach()
    return scaler


def _own_scaler(accelerator: Any) -> Any:
    """The GradScaler that it has, or would have by its `GradScalerKwargs`; None where nothing is asked for."""
    handler = accelerator.scaler_handler
    if accelerator.scaler is None and handler is not None:
        return torch.amp.GradScaler(accelerator.device.type, **handler.to_kwargs())
    return accelerator.scaler


def _refuse(accelerator: Any) -> None:
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if accelerator.mixed_precision not in NAMES or kind in ("DEEPSPEED", "MEGATRON_LM", "FSDP", "XLA"):
        raise SetupError(
            f"mixed_precision={accelerator.mixed_precision!r} with distributed_type={kind!r} has a step of its own, "
            "which the engine does not take over\n  do    leave prepare(accelerator) out; `ampguard run` watches it all the same"
        )
    is_off = accelerator.mixed_precision == "fp16" and not accelerator.native_amp
    if is_off and accelerator._models:
        raise SetupError(
            "the model was prepared before, in float32: Accelerate leaves mixed_precision='fp16' off on the CPU\n"
            "  do    call ampguard's prepare(accelerator) before accelerator.prepare(model, optimizer)"
        )


def _give(wrapped: Any, scaler: AcceleratedScaler) -> None:
    """An optimizer that was prepared before us."""
    wrapped.scaler = scaler
    wrapped.__setstate__({})  # as after unpickling: it then notices whether its step is called


def _extend(accelerator: Any, scaler: AcceleratedScaler) -> None:
    """Two calls of this accelerator's: `prepare_optimizer` passes the scaler on, `backward` says what it scales."""
    prepare_optimizer, backward = accelerator.prepare_optimizer, accelerator.backward

    @functools.wraps(prepare_optimizer)
    def prepare_with_scaler(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        wrapped = prepare_optimizer(optimizer, *args, **kwargs)
        if wrapped.scaler is not scaler:
            _give(wrapped, scaler)
        scaler.attach()
        return wrapped

    @functools.wraps(backward)
    def backward_of_scaled(loss: Tensor, **kwargs: Any) -> Any:
        scaler.losses.saw(loss)
        with scaler.scaled_backward():
            return backward(loss, **kwargs)

    accelerator.prepare_optimizer = prepare_with_scaler
    accelerator.backward = backward_of_scaled
