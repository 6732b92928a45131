"""Lightning's mixed precision over the engine: a precision plugin for its Trainer and for Fabric, and a callback.

    from ampguard.integrations.lightning import GuardCallback, GuardedPrecision

    Trainer(plugins=[GuardedPrecision("16-mixed", "cuda")], callbacks=[GuardCallback()])
    Fabric(plugins=[GuardedPrecision("16-mixed", "cuda")])

Works with `lightning` and with `pytorch_lightning`. docs/integrations/lightning.md says what is gained.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from ampguard import compat
from ampguard.engine.own_loop import device_type_of
from ampguard.errors import SetupError
from ampguard.integrations import lightning_packages as packages
from ampguard.integrations.lightning_callback import GuardCallback
from ampguard.integrations.scaler import PATIENCE
from ampguard.integrations.shared_scaler import SharedScaler
from ampguard.integrations.waiting import let_wait

__all__ = ["GuardCallback", "GuardedPrecision"]


class GuardedPrecision:
    """Lightning's `MixedPrecision`, with one update of the loss scale an iteration however many optimizers there are.

    `precision` is "16-mixed" (float16 on the CPU too) or "bf16-mixed"; `device` is autocast's. A GradScaler given as
    `scaler` says scale, factors and interval. A step whose gradients are not finite changes nothing in either
    precision, and after `patience` such steps in a row NonfiniteError ends the run (None: never).

    An instance is a `MixedPrecision` of the Lightning that the script has imported, and keeps its state in
    checkpoints under that name: each side loads what the other has saved.
    """

    precision: str
    device: str
    scaler: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> GuardedPrecision:
        plugin: GuardedPrecision = object.__new__(_over(cls, packages.imported()))  # type: ignore[arg-type]
        return plugin  # a class of Lightning's too, whichever Lightning this is

    def __init__(
        self,
        precision: str = "16-mixed",
        device: str | torch.device = "cuda",
        scaler: Any = None,
        *,
        init_scale: float = 2.0**16,
        growth_interval: int = 2000,
        patience: int | None = PATIENCE,
    ) -> None:
        if scaler is not None and not hasattr(scaler, "is_enabled"):
            raise SetupError(
                f"scaler={scaler!r}: a {type(scaler).__name__} is no GradScaler\n  do    leave it out, or give one"
            )
        package = packages.imported()[0]
        self._base = packages.mixed_precision(package)
        self._fabric = packages.mixed_precision(packages.fabric_of(package))
        self._given = (precision, str(device), scaler)
        self._options = {"init_scale": init_scale, "growth_interval": growth_interval, "patience": patience}
        name = device_type_of(device)
        self._base.__init__(self, precision, name, scaler or (_Unused() if precision == "16-mixed" else None))
        self._fabric.__init__(self, precision, name, self.scaler)
        self._optimizers: list[Optimizer] = []
        self._modules: list[weakref.ref[nn.Module]] = []
        self._is_trained = False
        self._undo: list[Callable[[], None]] = []
        scales = scaler is None or scaler.is_enabled()
        self.engine = SharedScaler(
            "bf16" if precision != "16-mixed" else "fp16" if scales else "fp32",
            optimizers=lambda: self._optimizers,
            backward_call="self.manual_backward(loss)",
            step_call="step() of the optimizer that self.optimizers() gives (in Fabric: that fabric.setup() has returned)",
            clip_call="self.clip_gradients(optimizer, ...) (in Fabric: fabric.clip_gradients) instead of PyTorch's clipping",
            **self._options,
        )
        """Scales, checks and steps; `engine.result` says what the last step did."""
        self.engine.bystanders = self._parameters
        if scaler is not None and scaler.is_enabled():
            self.engine.take_over(scaler.state_dict())
        self.scaler = self.engine if precision == "16-mixed" else None

    def __reduce__(self) -> Any:
        state = self.engine.state_dict() if self.scaler is not None else {}
        return _made_again, (self.__class__.__mro__[1], self._given, self._options, state)

    # --- a training begins and ends -----------------------------------------------------------------------------------

    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        """The Trainer says what it trains."""
        self._is_trained = True
        self._let_go()
        if optimizers:
            self.engine.forget_all_but(optimizers)
            self._optimizers = list(optimizers)
            self.engine._model = model
            self.engine.attach()
        for config in lr_schedulers:
            waits = let_wait(config.scheduler)
            if waits is not None:
                gate, undo = waits
                self.engine.listeners.append(gate.stepped)
                self._undo.append(undo)
        return model, optimizers, lr_schedulers

    def teardown(self) -> None:
        self._let_go()
        self._base.teardown(self)

    def _let_go(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()
        self.engine.listeners.clear()

    def convert_module(self, module: nn.Module) -> nn.Module:
        self._modules.append(weakref.ref(module))
        converted: nn.Module = self._base.convert_module(self, module)
        return converted

    def _parameters(self) -> Iterator[Tensor]:
        for ref in self._modules:
            module = ref()
            if module is not None:
                yield from compat.all_parameters(module)

    # --- forward ------------------------------------------------------------------------------------------------------

    def forward_context(self) -> Any:
        return self._side.forward_context(self)

    def convert_input(self, data: Any) -> Any:
        return self._side.convert_input(self, data)

    def convert_output(self, data: Any) -> Any:
        return self._side.convert_output(self, data)

    @contextlib.contextmanager
    def train_step_context(self) -> Iterator[None]:
        """Around each `training_step`: an iteration."""
        self.engine.settle()
        with self._base.train_step_context(self):
            yield

    @property
    def _side(self) -> Any:
        """The class of Lightning's that is in charge: the Trainer's or Fabric's."""
        return self._base if self._is_trained else self._fabric

    # --- backward and step --------------------------------------------------------------------------------------------

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        return self._side.pre_backward(self, tensor, module)

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        with self.engine.scaled_backward():
            self._side.backward(self, tensor, model, *args, **kwargs)

    def post_backward(self, tensor: Tensor, module: Any) -> Any:
        return self._side.post_backward(self, tensor, module)

    def unscale_gradients(self, optimizer: Any) -> None:
        """Divide its gradients by the loss scale now, to read or clip them by hand before `optimizer.step()`."""
        if self.scaler is not None:
            self.engine.unscale_(_raw(optimizer))

    def optimizer_step(self, optimizer: Any, model: Any = None, closure: Any = None, **kwargs: Any) -> Any:
        """Unscale, call the hooks, clip, step or skip; the scale follows once all optimizers have stepped."""
        if isinstance(optimizer, LBFGS):  # float16: Lightning's own refusal
            words = {"model": model} if self._is_trained else {}
            return self._side.optimizer_step(self, optimizer, closure=closure, **words, **kwargs)
        result = closure() if closure is not None else None
        if self._is_trained:
            if result is None and model.automatic_optimization:  # training_step has returned None
                self._base._after_closure(self, model, optimizer)
                return result
            if self.scaler is not None or self.engine.measures_norm:
                self.engine.unscale_(optimizer)
            self._base._after_closure(self, model, optimizer)
        self.engine.step(optimizer, **kwargs)
        self.engine.update()
        return result

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Clips true gradients, in manual optimisation and of fused optimizers too."""
        optimizer = _raw(optimizer)
        if clip_val is None or clip_val <= 0:
            return
        if self.scaler is not None or self.engine.measures_norm:
            self.engine.unscale_(optimizer)
        if str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)) == "value":
            self._base.clip_grad_by_value(self, optimizer, clip_val)
        else:
            self._base.clip_grad_by_norm(self, optimizer, clip_val)

    def _clip_gradients(
        self, model: Any, optimizer: Any, clip_val: float | None = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """Automatic optimisation: the module's own hook decides."""
        if getattr(model, "automatic_optimization", False):
            words = {"gradient_clip_val": clip_val, "gradient_clip_algorithm": gradient_clip_algorithm}
            packages.call_hook(model.trainer, "configure_gradient_clipping", optimizer, **words)

    # --- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return self.engine.state_dict() if self.scaler is not None else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if self.scaler is not None:
            self.engine.load_state_dict(state_dict)


class _Unused:
    """Stands where Lightning would make a GradScaler, which warns where there is no GPU."""


def _raw(optimizer: Any) -> Optimizer:
    """What Lightning's wrapper, as `self.optimizers()` gives it, has inside."""
    inner = getattr(optimizer, "optimizer", None)
    found: Optimizer = inner if isinstance(inner, Optimizer) else optimizer
    return found


@functools.cache
def _over(cls: type[GuardedPrecision], names: tuple[str, ...]) -> Any:
    """The class with those of Lightning's beneath it, under the name that checkpoints know."""
    trainers = [packages.mixed_precision(name) for name in names]
    fabrics = [packages.mixed_precision(packages.fabric_of(name)) for name in names]
    bases = tuple(dict.fromkeys([*trainers, *fabrics]))
    if issubclass(cls, bases):
        return cls
    own = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__qualname__": "MixedPrecision"}
    return type(cls.__name__, (cls, *bases), own)


def _made_again(cls: Any, given: tuple[Any, ...], options: Mapping[str, Any], state: Mapping[str, Any]) -> Any:
    plugin = cls(*given, **options)
    plugin.load_state_dict(state)
    return plugin
