"""The loop of detectron2 and FastReID, for where neither is installed: hooks around `run_step`, metrics, a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ampguard.errors import CheckpointError

METHODS = ("before_train", "after_train", "before_step", "after_backward", "after_step")


class Storage:
    """The scalars of each iteration, by name."""

    def __init__(self) -> None:
        self.iter = 0
        self.history: dict[str, list[tuple[int, float]]] = {}

    def put_scalar(self, name: str, value: float, **_: Any) -> None:
        self.history.setdefault(name, []).append((self.iter, float(value)))

    def latest(self) -> dict[str, float]:
        return {name: values[-1][1] for name, values in self.history.items()}


class SimpleTrainer:
    """What `AMPTrainer` builds upon without a framework; the names are theirs."""

    def __init__(self, model: nn.Module, data_loader: Iterable[Any], optimizer: Optimizer) -> None:
        model.train()
        self.model = model
        self.data_loader = data_loader
        self.optimizer = optimizer
        self.iter = self.start_iter = self.max_iter = 0
        self.storage = Storage()
        self._hooks: list[Any] = []
        self._iterator: Iterator[Any] | None = None

    @property
    def _data_loader_iter(self) -> Iterator[Any]:
        if self._iterator is None:
            self._iterator = iter(self.data_loader)
        return self._iterator

    def register_hooks(self, hooks: Iterable[Any]) -> None:
        """Objects with any of `METHODS`; each gets the trainer as `hook.trainer`."""
        for hook in hooks:
            if hook is not None:
                hook.trainer = self
                self._hooks.append(hook)

    def train(self, start_iter: int, max_iter: int) -> None:
        self.iter = self.start_iter = start_iter
        self.max_iter = max_iter
        try:
            self._tell("before_train")
            for self.iter in range(start_iter, max_iter):
                self.storage.iter = self.iter
                self._tell("before_step")
                self.run_step()
                self._tell("after_step")
            self.iter += 1
        finally:
            self._tell("after_train")

    def run_step(self) -> None:
        raise NotImplementedError

    def after_backward(self) -> None:
        self._tell("after_backward")

    def _tell(self, moment: str) -> None:
        for hook in self._hooks:
            call = getattr(hook, moment, None)
            if call is not None:
                call()

    def _write_metrics(self, loss_dict: Mapping[str, Tensor], data_time: float) -> None:
        """Raises FloatingPointError where the sum of the losses is not finite."""
        metrics = {name: float(loss.detach()) for name, loss in loss_dict.items()}
        total = sum(metrics.values())
        if not math.isfinite(total):
            raise FloatingPointError(f"Loss became infinite or NaN at iteration={self.iter}!\nloss_dict = {metrics}")
        self.storage.put_scalar("data_time", data_time)
        self.storage.put_scalar("total_loss", total)
        for name, value in metrics.items():
            self.storage.put_scalar(name, value)

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": self.iter, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        missing = [key for key in ("iteration", "optimizer") if key not in (state_dict or ())]
        if missing:
            raise CheckpointError(
                f"the checkpoint was not loaded: it holds no {' and no '.join(map(repr, missing))}\n"
                "  do    pass what trainer.state_dict() returned"
            )
        self.iter = state_dict["iteration"]
        self.optimizer.load_state_dict(state_dict["optimizer"])
