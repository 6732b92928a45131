"""Lightning's callback: the loss scale, the norm and the skipped steps in the trainer's logs, and the guard's report."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from ampguard.integrations import lightning_packages as packages
from ampguard.integrations.reporting import Reporting
from ampguard.integrations.shared_scaler import SharedScaler


class GuardCallback:
    """Logs `ampguard/loss_scale`, `ampguard/grad_norm` and `ampguard/skipped_steps` as often as the trainer logs.

    Scale and skipped steps need `GuardedPrecision`; with Lightning's own plugin the scale alone is logged. When the
    training ends or fails, the guard's report is written, if a guard is on (`ampguard run`, `ampguard.watch()`); with
    `watch=True` one is begun for the training where none is on. `callback.report_path` says where it is.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> GuardCallback:
        callback: GuardCallback = object.__new__(_over(cls, packages.imported()))  # type: ignore[arg-type]
        return callback

    def __init__(self, *, watch: bool = False) -> None:
        self._reporting = Reporting(watch)
        self.report_path: Path | None = None

    def __reduce__(self) -> Any:
        return functools.partial(_made_again, self.__class__.__mro__[1], watch=self._reporting.watches), ()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            engine = _engine(trainer)
            if engine is not None and trainer.loggers:
                engine.measures_norm = True
            self._reporting.begin(trainer.log_dir or trainer.default_root_dir)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step)
        if not trainer.loggers or not trainer.log_every_n_steps or (batch_idx + 1) % trainer.log_every_n_steps:
            return
        metrics = _metrics(trainer)
        for logger in trainer.loggers if metrics else ():
            logger.log_metrics(metrics, step=step)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self.report_path = self._reporting.end() or self.report_path

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.report_path = self._reporting.end(exception) or self.report_path


def _engine(trainer: Any) -> SharedScaler | None:
    engine = getattr(trainer.precision_plugin, "engine", None)
    return engine if isinstance(engine, SharedScaler) else None


def _metrics(trainer: Any) -> dict[str, float]:
    """What there is to log. Waits for the device."""
    engine = _engine(trainer)
    if engine is None:
        scale = getattr(trainer.scaler, "get_scale", None)
        return {} if scale is None else {"ampguard/loss_scale": scale()}
    engine.settle()
    metrics = {"ampguard/skipped_steps": float(engine.skipped_steps)}
    if engine.is_enabled():
        metrics["ampguard/loss_scale"] = engine.get_scale()
    return metrics | {f"ampguard/{name}": norm for name, norm in engine.norms().items()}


@functools.cache
def _over(cls: type[GuardCallback], names: tuple[str, ...]) -> Any:
    bases = tuple(base for name in names if (base := packages.callback(name)) is not None)
    if issubclass(cls, bases):
        return cls
    return type(cls.__name__, (cls, *bases), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def _made_again(cls: Any, watch: bool) -> Any:
    return cls(watch=watch)
