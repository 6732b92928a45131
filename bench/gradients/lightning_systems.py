"""Lightning's Trainer: automatic optimisation where it has the scenario, manual elsewhere."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from systems import System
from torch import Tensor
from torch.utils.data import DataLoader
from truth import Judge, flat

from scenarios import BATCHES, MAX_NORM, loss_of


class Lightning(System):
    """Its own plugin, made by hand: on the CPU the Trainer would take bfloat16."""

    name = "Lightning"

    def begin(self) -> None:
        import lightning.pytorch as pl

        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        self.module = _module(pl, self)
        options: dict[str, Any] = {}
        if self.scenario.is_automatic:
            options["accumulate_grad_batches"] = self.scenario.window
            options["gradient_clip_val"] = MAX_NORM if self.scenario.clip else None
        self.trainer = pl.Trainer(
            accelerator="cpu", max_epochs=1, plugins=[self.plugin()], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, **options,
        )  # fmt: skip

    def plugin(self) -> Any:
        from lightning.pytorch.plugins import MixedPrecision

        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))

    def run(self) -> Judge:
        self.trainer.fit(self.module, DataLoader(range(BATCHES), batch_size=1))
        return self.judge

    def losses(self, number: int) -> list[Tensor]:
        return [loss_of(self.scenario, i, part, number) for i, part in enumerate(self.parts)]

    def backward(self, loss: Tensor) -> None:
        self.module.manual_backward(loss / self.scenario.window)

    def clip(self, i: int) -> None:
        self.module.clip_gradients(self.optimizer(i), gradient_clip_val=MAX_NORM, gradient_clip_algorithm="norm")

    def step(self, i: int) -> None:
        self.optimizer(i).step()

    def optimizer(self, i: int) -> Any:
        found = self.module.optimizers()
        return found[i] if isinstance(found, list) else found


class GuardedLightning(Lightning):
    """The drop-in."""

    name = "ampguard in Lightning"

    def plugin(self) -> Any:
        from ampguard.integrations.lightning import GuardedPrecision

        return GuardedPrecision("16-mixed", "cpu")


def _module(pl: Any, system: System) -> Any:
    scenario, judge = system.scenario, system.judge

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = scenario.is_automatic
            self.parts = torch.nn.ModuleList(system.parts)

        def configure_optimizers(self) -> Any:
            return system.optimizers

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            if not scenario.is_automatic:
                system.iteration(batch_idx)
                return None
            self.before = flat(judge.parts[0])
            judge.saw_batch(0, batch_idx)
            return system.losses(batch_idx)[0]

        def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
            if scenario.is_automatic and (batch_idx + 1) % scenario.window == 0:
                if scenario.clip:
                    judge.clipped(0)
                judge.stepped(0, self.before)

    return Module()
