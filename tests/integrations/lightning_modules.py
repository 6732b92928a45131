"""LightningModules on scikit-learn's digits, made for a package name: `lightning.pytorch` or `pytorch_lightning`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from digits_loops import IMAGES, LABELS, network
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]
ROWS = 16

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def loader(batches: int, bad: tuple[int, ...] = ()) -> DataLoader[Any]:
    """The same digits in the same order; the batches in `bad` are too bright for float16."""
    rows = torch.randint(0, 1400, (batches * ROWS,), generator=torch.Generator().manual_seed(1))
    images = IMAGES[rows].clone()
    for number in bad:
        images[number * ROWS : (number + 1) * ROWS] *= 1e6
    return DataLoader(TensorDataset(images, LABELS[rows]), batch_size=ROWS)


def fit(package: str, module: Any, plugin: Any, batches: int = 8, bad: tuple[int, ...] = (), **words: Any) -> Any:
    """The Trainer, after a training of one epoch."""
    ckpt_path = words.pop("ckpt_path", None)
    trainer = importlib.import_module(package).Trainer(**{**QUIET, **words}, plugins=[plugin] if plugin else [])
    trainer.fit(module, loader(batches, bad), ckpt_path=ckpt_path)
    return trainer


def own_plugin(package: str, precision: str = "16-mixed") -> Any:
    """Lightning's own, in real float16 on the CPU."""
    scaler = torch.amp.GradScaler("cpu") if precision == "16-mixed" else None
    return importlib.import_module(f"{package}.plugins").MixedPrecision(precision, "cpu", scaler)


def classifier(package: str, **words: Any) -> Any:
    """Automatic optimisation of the network; `words`: optimizer, scheduler (of the optimizer)."""
    base: Any = importlib.import_module(package).LightningModule

    class Classifier(base):  # type: ignore[misc, valid-type]
        def __init__(self, optimizer: Callable[..., Any] | None = None, scheduler: Any = None) -> None:
            super().__init__()
            self.net = network()
            self.make_optimizer = optimizer or (lambda p: torch.optim.AdamW(p, 1e-3))
            self.make_scheduler = scheduler
            self.rates: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            self.rates.append(self.optimizers().param_groups[0]["lr"])

        def configure_optimizers(self) -> Any:
            optimizer = self.make_optimizer(self.net.parameters())
            if self.make_scheduler is None:
                return optimizer
            return {"optimizer": optimizer, "lr_scheduler": self.make_scheduler(optimizer)}

    return Classifier(**words)


Step = Callable[[Any, list[Any], list[Tensor], int], None]
"""What happens in a training step: the module, its optimizers, a loss for each, the batch's number."""


def one_backward(module: Any, optimizers: list[Any], losses: list[Tensor], number: int) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    module.manual_backward(torch.stack(losses).sum())
    for optimizer in optimizers:
        optimizer.step()


def several(package: str, step: Step = one_backward, count: int = 3, lr: float = 0.0, **words: Any) -> Any:
    """Manual optimisation: linear classifiers, each with its own optimizer. Keeps the gradients' norms of each step."""
    base: Any = importlib.import_module(package).LightningModule

    class Several(base):  # type: ignore[misc, valid-type]
        def __init__(self, burst: tuple[tuple[int, int], ...] = (), scheduler: Any = None) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.automatic_optimization = False
            self.parts = nn.ModuleList(nn.Linear(64, 10) for _ in range(count))
            self.burst = dict(burst)
            self.scheduler = scheduler
            self.norms: list[list[float]] = []
            self.scales: list[float] = []

        def configure_optimizers(self) -> Any:
            optimizers = [torch.optim.SGD(part.parameters(), lr) for part in self.parts]
            return (optimizers, [self.scheduler(optimizers[0])]) if self.scheduler else optimizers

        def training_step(self, batch: Any, batch_idx: int) -> None:
            x = batch[0].flatten(1)
            losses = [nn.functional.cross_entropy(part(x).float(), batch[1]) for part in self.parts]
            if batch_idx in self.burst:  # a gradient that does not fit float32 when it is scaled
                losses[self.burst[batch_idx]] = losses[self.burst[batch_idx]] * 1e36
            optimizers = self.optimizers()
            step(self, optimizers if isinstance(optimizers, list) else [optimizers], losses, batch_idx)
            self.norms.append([norm(part) for part in self.parts])

        def on_train_batch_end(self, *_: Any) -> None:
            self.scales.append(self.trainer.scaler.get_scale() if self.trainer.scaler else 1.0)

    return Several(**words)


def norm(module: nn.Module) -> float:
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0


def line_of(function: Callable[..., Any], text: str) -> int:
    """The number of the first line of a function that holds the text."""
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)
