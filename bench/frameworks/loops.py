"""The workloads of bench/overhead in the loops of others: Lightning, HF Trainer, torch.compile, DDP."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import torch
from paced import Pace, SameBatch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

Paced = Callable[[nn.Module], Pace]
"""Makes the pace once the model is there."""

BATCHES = {
    "tiny": lambda: (torch.randn(8, 16), torch.randint(4, (8,))),
    "vit": lambda: (torch.randn(2, 3, 24, 24), torch.randint(10, (2,))),
}
RATES = {"tiny": 1e-3, "vit": 1e-4}


def model_of(workload: str) -> nn.Module:
    """The model of `bench/overhead/<workload>.py`."""
    return importlib.import_module(workload).make("cpu")[0]


def lightning(workload: str, paced: Paced) -> None:
    """`Trainer.fit`, automatic optimisation, real float16 with a scaler, gradients clipped."""
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.precision import MixedPrecision

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model_of(workload)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            x, y = batch
            loss = functional.cross_entropy(self.net(x), y)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=RATES[workload])

    module = Classifier()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        plugins=MixedPrecision("16-mixed", "cpu", scaler),
    )
    trainer.fit(module, DataLoader(SameBatch(paced(module), *BATCHES[workload]()), batch_size=None))


class WithLoss(nn.Module):
    """What HF's Trainer expects of a model: a dictionary with the loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def hf_trainer(workload: str, paced: Paced) -> None:
    """`Trainer.train` in float32 (it has no float16 on the CPU), gradients clipped."""
    from transformers import Trainer, TrainingArguments

    model = WithLoss(model_of(workload))
    pace = paced(model)

    class OneBatch(Trainer):
        def get_train_dataloader(self) -> Any:
            loader = DataLoader(SameBatch(pace, *BATCHES[workload]()), batch_size=None, collate_fn=named)
            return self.accelerator.prepare(loader)

    with TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=10**6,
            learning_rate=RATES[workload],
            use_cpu=True,
            logging_steps=50,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        OneBatch(model=model, args=args, train_dataset=[0], callbacks=[quiet(), stop_with(pace)]).train()


def named(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return {"x": batch[0], "labels": batch[1]}


def stop_with(pace: Pace) -> Any:
    """The Trainer begins another epoch where its loader ends: stop it there."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_training_stop = True
            return control

    return Stop()


def quiet() -> Any:
    """Loss values on the terminal are no part of what is measured."""
    from transformers import TrainerCallback
    from transformers.trainer_callback import PrinterCallback

    class Remove(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            PrinterCallback.on_log = lambda *_, **__: None  # type: ignore[method-assign,assignment]

    return Remove()


def compiled(workload: str, paced: Paced, backend: str) -> None:
    """The loop of bench/overhead around a compiled model."""
    train(workload, torch.compile(model_of(workload), backend=backend), paced)


def ddp(workload: str, paced: Paced) -> None:
    """This rank's part of the same loop around DistributedDataParallel; called in every rank."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(model_of(workload))
    torch.manual_seed(dist.get_rank())
    train(workload, model, paced)
    dist.destroy_process_group()


def train(workload: str, model: nn.Module, paced: Paced) -> None:
    """Float16 autocast, a scaler, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATES[workload])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, y = BATCHES[workload]()
    for _ in paced(model):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
