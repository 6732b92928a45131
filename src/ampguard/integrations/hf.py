"""Hugging Face Accelerate and the transformers Trainer over the engine: one call, and a callback.

    from ampguard.integrations.hf import prepare

    accelerator = Accelerator(mixed_precision="fp16")
    prepare(accelerator)                     # before accelerator.prepare(model, optimizer, ...)

    trainer = Trainer(model, args, ...)
    prepare(trainer)                         # its accelerator, and a GuardCallback

docs/integrations/huggingface.md says what is gained.
"""

from __future__ import annotations

import functools
import importlib
import logging
from pathlib import Path
from typing import Any

from ampguard.errors import SetupError
from ampguard.integrations.accelerate_scaler import AcceleratedScaler, install
from ampguard.integrations.losses import Losses, loss_of
from ampguard.integrations.reporting import Reporting
from ampguard.integrations.scaler import PATIENCE

__all__ = ["AcceleratedScaler", "GuardCallback", "prepare"]

logger = logging.getLogger("ampguard")


def prepare(accelerator: Any, *, patience: int | None = PATIENCE) -> AcceleratedScaler:
    """Let an `Accelerator`, or that of a transformers `Trainer`, unscale, check and step by the engine.

    The loss scale is updated once an iteration, after the last optimizer; a step whose gradients are not finite
    changes nothing, in float16, bfloat16 and float32; float16 is real on the CPU. After `patience` skipped steps in a
    row NonfiniteError ends the run (None: never). A Trainer gets a `GuardCallback` too, unless it has one.

    Returns the scaler. Calling it again returns the same. Raises SetupError for DeepSpeed, FSDP, FP8 and the like.
    """
    trainer = accelerator if hasattr(accelerator, "callback_handler") else None
    if trainer is not None:
        accelerator = trainer.accelerator
    if not hasattr(accelerator, "distributed_type"):
        raise SetupError(
            f"prepare() takes an Accelerator or a transformers Trainer, not a {type(accelerator).__name__}\n"
            "  do    prepare(accelerator) before accelerator.prepare(model, optimizer), or prepare(trainer)"
        )
    scaler = getattr(accelerator, "_ampguard", None)
    if not isinstance(scaler, AcceleratedScaler):
        scaler = accelerator._ampguard = install(accelerator, patience)
    if trainer is not None:
        _call_back_first(trainer)
    return scaler


def _call_back_first(trainer: Any) -> None:
    """What it adds to the logs is there when TensorBoard's and others' callbacks see them."""
    callbacks = trainer.callback_handler.callbacks
    own = next((c for c in callbacks if isinstance(c, GuardCallback)), None)
    if own is None:
        trainer.add_callback(GuardCallback())
        own = callbacks[-1]
    callbacks.remove(own)
    callbacks.insert(0, own)


class GuardCallback:
    """Adds `loss_scale`, `skipped_steps` and `nonfinite_losses` to the Trainer's logs, and writes the guard's report.

    A loss that is NaN or Inf is told when it happens (on an accelerator: when the Trainer logs), also where the
    Trainer's `logging_nan_inf_filter` hides it. Skipped steps and the losses of a `compute_loss` of your own need
    `prepare(trainer)`; without it the loss is looked for in the model's output.

    When the training ends, the report is written if a guard is on (`ampguard run`, `ampguard.watch()`); with
    `watch=True` one is begun for the training where none is on. `callback.report_path` says where it is.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> GuardCallback:
        base = importlib.import_module("transformers").TrainerCallback
        callback: GuardCallback = object.__new__(_over(cls, base))  # type: ignore[arg-type]
        return callback

    def __init__(self, *, watch: bool = False) -> None:
        self._reporting = Reporting(watch)
        self._losses = Losses()
        self._hook: Any = None
        self._scaler: Any = None
        self._told = 0
        self.report_path: Path | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        self._scaler = getattr(others.get("optimizer"), "scaler", None)
        self._losses, self._told = Losses(), 0
        if isinstance(self._scaler, AcceleratedScaler):
            self._losses = self._scaler.losses = Losses()
        elif model is not None:
            self._hook = model.register_forward_hook(self._look)
        self._reporting.begin(args.output_dir)

    def _look(self, model: Any, _: Any, output: Any) -> None:
        if model.training:
            self._losses.saw(loss_of(output))

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self._losses.is_free:
            self._tell(state.global_step, args.logging_nan_inf_filter)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        self._tell(state.global_step, args.logging_nan_inf_filter)
        if logs is None or "loss" not in logs:
            return
        found = self._numbers()
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._tell(state.global_step, args.logging_nan_inf_filter)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self.report_path = self._reporting.end() or self.report_path

    def _numbers(self) -> dict[str, float]:
        numbers: dict[str, float] = {"nonfinite_losses": self._losses.bad}
        scaler = self._scaler
        if isinstance(scaler, AcceleratedScaler):
            scaler.settle()
            numbers["skipped_steps"] = scaler.skipped_steps
        if scaler is not None and scaler.is_enabled():
            numbers["loss_scale"] = scaler.get_scale()
        return numbers

    def _tell(self, step: int, is_hidden: bool) -> None:
        bad = self._losses.bad
        if bad == self._told:
            return
        since, self._told = bad - self._told, bad
        logger.warning(
            "by step %d: %s not finite%s%s",
            step,
            "1 loss that is" if since == 1 else f"{since} losses that are",
            ", in place of which the Trainer logs a mean (logging_nan_inf_filter)" if is_hidden else "",
            "" if self._reporting.is_guarded else ". `ampguard run` on the same script says where it comes from",
        )


@functools.cache
def _over(cls: type[GuardCallback], base: type) -> Any:
    """The class with that of transformers beneath it, which is imported when a callback is made."""
    if issubclass(cls, base):
        return cls
    return type(cls.__name__, (cls, base), {"__module__": cls.__module__, "__doc__": cls.__doc__})
