"""`AMPTrainer` for detectron2 and FastReID: their two signatures, hooks and errors, over the engine's scaler.

    from ampguard.integrations.d2 import AMPTrainer
    self._trainer = AMPTrainer(model, data_loader, optimizer)                   # detectron2
    self._trainer = AMPTrainer(model, data_loader, optimizer, param_wrapper)    # FastReID
    self._trainer = AMPTrainer.from_config(cfg, model, data_loader, optimizer)  # by SOLVER.AMP.ENABLED

A trainer is a `SimpleTrainer` of the framework that it is made for. Runs on any device.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from ampguard import compat
from ampguard.engine.arguments import refuse_loss
from ampguard.engine.own_loop import precision as precision_named
from ampguard.errors import LossError, SetupError
from ampguard.integrations import training_loop
from ampguard.integrations.d2_config import dtype_of, name_of
from ampguard.integrations.diagnosis import with_diagnosis
from ampguard.integrations.flat import FlatGradients
from ampguard.integrations.scaler import EngineScaler
from ampguard.integrations.updating import refuse_closures

__all__ = ["AMPTrainer"]


@dataclass
class _Detectron2:
    """What detectron2's trainer takes after model, data and optimizer, in its order."""

    gather_metric_period: int = 1
    zero_grad_before_forward: bool = False
    grad_scaler: Any = None
    precision: torch.dtype = torch.float16
    log_grad_scaler: bool = False
    async_write_metrics: bool = False
    param_wrapper: Any = None


@dataclass
class _FastReID:
    """The same of FastReID's."""

    param_wrapper: Any = None
    grad_scaler: Any = None
    precision: torch.dtype = torch.float16
    gather_metric_period: int = 1
    zero_grad_before_forward: bool = False
    log_grad_scaler: bool = False
    async_write_metrics: bool = False


_SIGNATURES: dict[str, type[_Detectron2] | type[_FastReID]] = {"detectron2": _Detectron2, "fastreid": _FastReID}


class AMPTrainer:
    """One step in mixed precision, with the hooks, metrics and checkpoints of the framework.

    The fourth positional argument tells the two apart: a number is detectron2's `gather_metric_period`, anything else
    FastReID's `param_wrapper` (which may also be given by name). `precision` is float16, bfloat16 or float32. A
    `grad_scaler` of your own keeps `scale`, `step`, `update`, `get_scale` and `state_dict`; the default one is the
    engine's.
    """

    model: nn.Module
    optimizer: Optimizer
    iter: int
    _hooks: list[Any]
    _data_loader_iter: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> AMPTrainer:
        base = _simple_trainer(_framework(args[3:], kwargs))
        trainer: AMPTrainer = object.__new__(cls if issubclass(cls, base) else _over(cls, base))
        return trainer

    def __init__(
        self, model: nn.Module, data_loader: Iterable[Any], optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        _refuse_strangers(model, optimizer)
        refuse_closures(optimizer, "AMPTrainer")
        _refuse_several_devices(model)
        framework = _framework(args, kwargs)
        options = _SIGNATURES[framework](*args, **kwargs)
        self._base = _simple_trainer(framework)
        taken = inspect.signature(self._base.__init__).parameters
        rest = {name: value for name, value in vars(options).items() if name in taken}
        super().__init__(model, data_loader, optimizer, **rest)  # type: ignore[call-arg]
        self.param_wrapper = options.param_wrapper
        self.zero_grad_before_forward = options.zero_grad_before_forward
        self.async_write_metrics = options.async_write_metrics
        self.log_grad_scaler = options.log_grad_scaler
        self.precision = options.precision
        self._amp = precision_named(name_of(options.precision), _device_of(model))
        own = options.grad_scaler
        self.grad_scaler: Any = own if own is not None else EngineScaler(self._amp, model=model)
        self._flat = FlatGradients(model, optimizer)
        if framework == "fastreid":
            self._keep_scale_with(optimizer)

    @classmethod
    def from_config(
        cls,
        cfg: Any,
        model: nn.Module,
        data_loader: Iterable[Any],
        optimizer: Optimizer,
        param_wrapper: Any = None,
        **options: Any,
    ) -> AMPTrainer:
        """In float16 where `SOLVER.AMP.ENABLED` (lazy configs: `train.amp.enabled`), else in float32.

        `SOLVER.AMP.PRECISION` ("float16", "bfloat16"), where the config has it, says which.
        """
        options.setdefault("precision", dtype_of(cfg))
        if param_wrapper is not None:
            options["param_wrapper"] = param_wrapper
        return cls(model, data_loader, optimizer, **options)

    # --- one iteration ------------------------------------------------------------------------------------------------

    def run_step(self) -> None:
        """Raises FloatingPointError where the loss is not finite, before anything is updated."""
        if not self.model.training:
            raise SetupError(
                "AMPTrainer trains, and the model was changed to eval mode\n  do    model.train() after the evaluation"
            )
        start = time.perf_counter()
        data = next(self._data_loader_iter)
        data_time = time.perf_counter() - start
        if self.zero_grad_before_forward:
            self._zero_grad()
        with self._amp.autocast():
            losses, loss_dict = _summed(self.model(data))
        refuse_loss(losses, "AMPTrainer")
        if not self.zero_grad_before_forward:
            self._zero_grad()
        self.grad_scaler.scale(losses).backward()
        if self.log_grad_scaler:
            self._event_storage().put_scalar("[metric]grad_scaler", self.grad_scaler.get_scale())
        with self._looking_at_hooks():
            self.after_backward()
        self._write(loss_dict, data_time)
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()
        if hasattr(self.param_wrapper, "assert_buffer_is_valid"):
            self.param_wrapper.assert_buffer_is_valid()

    def after_backward(self) -> None:
        """Tell the hooks, those of FastReID too, whose own trainer has no such moment."""
        if hasattr(self._base, "after_backward"):
            super().after_backward()  # type: ignore[misc]
            return
        for hook in self._hooks:
            getattr(hook, "after_backward", lambda: None)()

    def _looking_at_hooks(self) -> contextlib.AbstractContextManager[None]:
        """The engine's scaler tells of a hook that clips gradients which carry the loss scale."""
        if not isinstance(self.grad_scaler, EngineScaler):
            return contextlib.nullcontext()
        do = "call trainer.grad_scaler.unscale_(trainer.optimizer) in the hook before it clips"
        return self.grad_scaler.looking_for_writes(self.optimizer, do)

    def _zero_grad(self) -> None:
        """The optimizer's own `zero_grad`, which may be wrapped; flat buffers keep their gradients."""
        self.optimizer.zero_grad()
        self._flat.restore()

    def _write(self, loss_dict: Mapping[str, Tensor], data_time: float) -> None:
        write: Any = getattr(self, "_write_metrics")  # noqa: B009  (the framework's)
        if self.async_write_metrics and hasattr(self, "concurrent_executor"):
            self.concurrent_executor.submit(write, loss_dict, data_time, iter=self.iter)
            return
        try:
            write(loss_dict, data_time)
        except FloatingPointError as error:
            with contextlib.suppress(Exception):  # a diagnosis that fails must not hide the error itself
                with_diagnosis(error)
            raise

    def _event_storage(self) -> Any:
        get = getattr(sys.modules[self._base.__module__], "get_event_storage", None)
        return get() if get is not None else getattr(self, "storage")  # noqa: B009

    # --- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The framework's, with the scaler's under `grad_scaler`."""
        if hasattr(self._base, "state_dict"):
            state = super().state_dict()  # type: ignore[misc]
        else:
            state = {"iteration": getattr(self, "iter", 0), "optimizer": self.optimizer.state_dict()}
        return {**state, "grad_scaler": self.grad_scaler.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Also a state that the framework's own trainers have saved, with or without a scaler."""
        if hasattr(self._base, "load_state_dict"):
            super().load_state_dict(state_dict)  # type: ignore[misc]
        else:
            training_loop.SimpleTrainer.load_state_dict(self, state_dict)  # type: ignore[arg-type]
        if "grad_scaler" in state_dict:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])

    def _keep_scale_with(self, optimizer: Optimizer) -> None:
        """FastReID's checkpoints hold no trainer, but the optimizer: its state carries the scaler's."""

        def saved(_: Optimizer, state: dict[str, Any]) -> None:
            state["grad_scaler"] = self.grad_scaler.state_dict()

        def loaded(_: Optimizer, state: dict[str, Any]) -> None:
            if "grad_scaler" in state:
                self.grad_scaler.load_state_dict(state["grad_scaler"])

        optimizer.register_state_dict_post_hook(saved)
        optimizer.register_load_state_dict_pre_hook(loaded)


def _framework(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    is_fastreid = "param_wrapper" in kwargs or (bool(args) and not isinstance(args[0], int))
    return "fastreid" if is_fastreid else "detectron2"


@functools.cache
def _simple_trainer(framework: str) -> Any:
    """Its `SimpleTrainer`; ours where it is not installed."""
    try:
        return importlib.import_module(f"{framework}.engine.train_loop").SimpleTrainer
    except ImportError:
        return training_loop.SimpleTrainer


_combined: dict[tuple[type, type], Any] = {}


def _over(cls: type[AMPTrainer], base: type) -> Any:
    """The class with the framework's beneath it."""
    if (cls, base) not in _combined:
        names = {"__module__": cls.__module__, "__doc__": cls.__doc__}
        _combined[cls, base] = type(cls.__name__, (cls, base), names)
    return _combined[cls, base]


def _summed(losses: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
    if isinstance(losses, Tensor):
        return losses, {"total_loss": losses}
    if not isinstance(losses, Mapping) or not losses:
        raise LossError(
            f"AMPTrainer takes a loss or a dictionary of losses from the model, not {losses!r:.80}\n"
            "  do    let the model return {'loss': loss} while it trains"
        )
    total: Any = sum(losses.values())
    return total, losses


def _refuse_strangers(model: Any, optimizer: Any) -> None:
    for what, thing, fits in (
        ("model", model, isinstance(model, nn.Module)),
        ("optimizer", optimizer, hasattr(optimizer, "param_groups")),
    ):
        if not fits:
            raise SetupError(
                f"{what}: a {type(thing).__name__} is none\n  do    AMPTrainer(model, data_loader, optimizer, ...)"
            )


def _refuse_several_devices(model: nn.Module) -> None:
    several = isinstance(model, DistributedDataParallel) and len(model.device_ids or []) > 1
    if several or isinstance(model, DataParallel):
        raise SetupError(
            "AMPTrainer does not train on several devices in one process\n"
            "  do    one process for each device, with DistributedDataParallel"
        )


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in compat.all_parameters(model)), torch.device("cpu"))
