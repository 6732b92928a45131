"""`ampguard.precision`: autocast and scaler that belong together, for people who keep their own loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampguard import compat
from ampguard.engine import arguments
from ampguard.engine.precision import mode_named
from ampguard.engine.precision.late_optimizers import refuse_late
from ampguard.engine.precision.o2 import O2
from ampguard.engine.precision.o3 import O3
from ampguard.engine.setup import named, refuse_strangers
from ampguard.engine.step import GradientCheck, apply_update
from ampguard.errors import CheckpointError, PrecisionError, ProtocolError

ONLY_WITH_AMP = ("bf16-true", "float8")


class _ScalerOverMasters(compat.AskingScaler):
    """O2's: it says so where it is given an optimizer that holds the model's weights and not their masters."""

    before_unscale = staticmethod(refuse_late)


class LoopPrecision:
    """What `ampguard.precision` returns. Unpacks as `autocast, scaler`."""

    def __init__(self, name: str, device: str | torch.device | None = None) -> None:
        kind = mode_named(name)
        if kind.name in ONLY_WITH_AMP:
            raise PrecisionError(
                f"precision {kind.name!r} needs a step of its own, which a GradScaler does not have\n"
                f"  do    use ampguard.Amp(model, optimizer, precision={kind.name!r})"
            )
        self.device_type = device_type_of(device or _default_device())
        self._mode = kind(self.device_type)
        self._mode.refuse_if_unsupported([])
        self._is_ready = kind.weights_dtype == torch.float32
        self.name = kind.name
        self.dtype = kind.autocast_dtype or kind.weights_dtype
        scales = kind.scales_loss and kind.name != "O3"  # GradScaler refuses float16 gradients
        scaler = _ScalerOverMasters if kind.keeps_masters else torch.amp.GradScaler
        self.scaler = scaler(self.device_type, enabled=scales)

    def prepare(self, models: nn.Module | Sequence[nn.Module], optimizers: Optimizer | Sequence[Optimizer]) -> None:
        """Cast the models (O2, O3), and give the optimizers their master weights (O2). Does nothing in other modes.

        Raises SetupError where they do not belong together.
        """
        call = "p.prepare(models, optimizers)"
        models_by_name = named(models, nn.Module, "models", call)
        optimizers_by_name = named(optimizers, Optimizer, "optimizers", call)
        arguments.refuse_converted(models_by_name, optimizers_by_name)
        arguments.refuse_combinations(self._mode, self._mode, refuse_strangers(models_by_name, optimizers_by_name))
        arguments.refuse_hookless(optimizers_by_name, self._mode)
        roots, updating = list(models_by_name.values()), list(optimizers_by_name.values())
        self._is_ready = True
        self._mode.convert(roots, updating, [])
        arguments.note_converted(models_by_name, optimizers_by_name, self._mode)
        if isinstance(self._mode, O2):
            mode = self._mode
            before_step = compat.only_for_others(lambda stepped, *_: mode.before_update(stepped))
            for optimizer in updating:
                optimizer.register_step_pre_hook(before_step)
                optimizer.register_step_post_hook(lambda stepped, *_: mode.copy_to_model(stepped))
        if isinstance(self._mode, O3):
            for optimizer in updating:
                self._mode.follow_own_steps(optimizer)

    def apply_update(self, optimizer: Optimizer, check: GradientCheck, max_norm: float | None) -> None:
        """Update the parameters with checked gradients, which are divided and clipped afterwards, or leave all as it is."""
        if isinstance(self._mode, O2) and self._is_ready:
            self._mode.before_update(optimizer)
        if not (isinstance(self._mode, O3) and self._mode.apply_own(optimizer, check, max_norm)):
            apply_update(optimizer, check, max_norm, write_back=True)

    def weight_of(self, held: Tensor) -> Tensor:
        """The model's own of what an optimizer holds: in O2 that of a master weight."""
        return self._mode.parameter_of(held)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside model, optimizer and scaler: in O2 the float32 master weights, else nothing."""
        if not (isinstance(self._mode, O2) and self._is_ready):
            return {}
        self._mode.before_reading()
        return self._mode.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """After the model has loaded its weights, and the optimizer its state. Raises CheckpointError for another model's."""
        if not isinstance(state, Mapping):
            raise CheckpointError(
                f"the checkpoint was not loaded: a {type(state).__name__} is no state of ampguard.precision({self.name!r})\n"
                "  do    pass what its state_dict() returned, from the checkpoint of a run in this precision"
            )
        if isinstance(self._mode, O2) and self._is_ready:
            self._mode.check_state(state)
            self._mode.load_state_dict(state)

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """For the forward pass and the loss; leaves autocast where the precision has none."""
        if not self._is_ready:
            raise ProtocolError(
                f"precision {self.name!r} has its weights in float16, and the model has not been cast\n"
                "  do    keep what ampguard.precision() returned and call its prepare(model, optimizer) once, before the loop",
                "fp16-parameters",
            )
        if torch.is_grad_enabled():
            self._mode.before_forward()
        else:
            self._mode.before_reading()
        with self._mode.computing(), self._mode.autocast():
            yield

    def __iter__(self) -> Iterator[Any]:
        return iter((self.autocast, self.scaler))


def precision(name: str, device: str | torch.device | None = None) -> LoopPrecision:
    """Matching autocast and scaler for `O0`, `O1`, `O2`, `O3`, `fp32`, `tf32`, `fp16`, `bf16` (and their other names).

        autocast, scaler = ampguard.precision("O1", "cuda")
        with autocast():
            loss = criterion(model(x), y)
        scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()

    The scaler is a real GradScaler, switched off where the precision needs none: the same loop serves every precision.
    O2 and O3 also change the model: `p = ampguard.precision("O2"); p.prepare(model, optimizer)` before the loop.
    `device` is the accelerator where there is one.
    """
    return LoopPrecision(name, device)


def device_type_of(given: Any) -> str:
    """`cuda` of `cuda:1`. Raises PrecisionError for what is no device."""
    try:
        return torch.device(given).type
    except (RuntimeError, TypeError) as error:
        raise PrecisionError(
            f"{given!r} is no device of PyTorch's\n  do    name one, say 'cuda' or 'cpu', or leave it out"
        ) from error


def _default_device() -> str:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator is not None else "cpu"
