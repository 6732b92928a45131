"""Gradients that were clipped while still scaled do harm once they are used, and none where they are thrown away."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

Guard = Callable[..., Any]


def train(discards: Callable[[int], bool], steps: int = 6) -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.randn(8, 4)
    for step in range(steps):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(net(x).float(), x.sum(1, keepdim=True))
        scaler.scale(loss).backward()
        if discards(step):
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            opt.zero_grad()
            continue
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()


def test_discarded_gradients_that_were_clipped(guard: Guard) -> None:
    run = guard(lambda: train(lambda step: step in (0, 3)))
    assert run.faults == 0
    assert run.report.incidents == ()


def test_clipped_and_left_at_the_end(guard: Guard) -> None:
    """What is still there when the run ends is told: nobody has thrown it away."""

    def body() -> None:
        net = nn.Linear(4, 1)
        opt = torch.optim.SGD(net.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(net(torch.ones(2, 4)).sum()).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        assert opt.param_groups

    run = guard(body)
    assert [i.cause for i in run.report.incidents] == ["clip-before-unscale"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("skipped", [1, None])
def test_a_batch_left_out_at_the_end_of_a_window(skipped: int | None, guard: Guard) -> None:
    """Lightning does not unscale then, clips what the window holds, and clears it before the next one."""
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.plugins.precision import MixedPrecision

    class Regression(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            loss = nn.functional.mse_loss(self.net(batch[0]).float(), batch[1])
            return None if index == skipped else loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    def body() -> None:
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", plugins=plugin, enable_model_summary=False, accumulate_grad_batches=2,
            gradient_clip_val=0.1, **quiet,
        )  # fmt: skip
        x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
        trainer.fit(Regression(), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8))

    run = guard(body)
    assert run.faults == 0
    assert run.report.incidents == ()
