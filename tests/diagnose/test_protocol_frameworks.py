"""In a framework's loop the fix is in the framework's words: its own calls divide, step and update."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ampguard.incident import Incident

pytestmark = pytest.mark.filterwarnings("ignore")
Guard = Callable[..., Any]
SCALE = 1024.0


def first_of(run: Any) -> Incident:
    assert run.faults == 0, run.stderr
    return next(i for i in run.report.incidents if i.severity != "info")  # type: ignore[no-any-return]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def batches(count: int = 6) -> DataLoader[Any]:
    x = torch.randn(8 * count, 4)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)


# --- Lightning -----------------------------------------------------------------------------------------------------------


def lightning_fit(module_of: Callable[[Any], Any], scale: float = SCALE) -> Callable[[], None]:
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.plugins.precision import MixedPrecision

    def body() -> None:
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", plugins=plugin, enable_model_summary=False, **quiet
        )
        trainer.fit(module_of(lightning), batches())

    return body


def regression(lightning: Any) -> Any:
    class Regression(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, _: int) -> Any:
            return nn.functional.mse_loss(self.net(batch[0]).float(), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Regression


def test_clipping_in_a_lightning_hook(guard: Guard) -> None:
    def module(lightning: Any) -> Any:
        class Clips(regression(lightning)):  # type: ignore[misc]
            def on_after_backward(self) -> None:
                nn.utils.clip_grad_norm_(self.parameters(), 0.1)

        return Clips()

    incident = first_of(guard(lightning_fit(module)))
    assert incident.cause == "clip-before-unscale"
    how = incident.fixes[0].how
    assert "def on_before_optimizer_step(self, optimizer): nn.utils.clip_grad_norm_(self.parameters(), 0.1)" in how
    assert "scaler.unscale_(" not in how  # it would be the second


def test_clipping_in_a_line_with_more_than_that(guard: Guard) -> None:
    def module(lightning: Any) -> Any:
        class Clips(regression(lightning)):  # type: ignore[misc]
            def on_after_backward(self) -> None: nn.utils.clip_grad_norm_(self.parameters(), 0.1)  # fmt: skip

        return Clips()

    how = first_of(guard(lightning_fit(module))).fixes[0].how
    assert "def on_before_optimizer_step(self, optimizer): ...;" in how
    assert "on_after_backward" not in how


def test_clipping_in_a_callback_of_lightning(guard: Guard) -> None:
    def module(lightning: Any) -> Any:
        class Clips(lightning.Callback):  # type: ignore[misc]
            def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
                nn.utils.clip_grad_norm_(pl_module.parameters(), 0.1)

        class Watched(regression(lightning)):  # type: ignore[misc]
            def configure_callbacks(self) -> Any:
                return [Clips()]

        return Watched()

    how = first_of(guard(lightning_fit(module))).fixes[0].how
    assert "def on_before_optimizer_step(self, trainer, pl_module, optimizer): nn.utils.clip_grad_norm_(pl_mod" in how


def test_clipping_by_lightning_in_manual_optimization(guard: Guard) -> None:
    def module(lightning: Any) -> Any:
        class Manual(regression(lightning)):  # type: ignore[misc]
            automatic_optimization = False

            def training_step(self, batch: Any, _: int) -> None:
                chosen = self.optimizers()
                self.manual_backward(super().training_step(batch, _))
                self.clip_gradients(chosen, gradient_clip_val=0.1)
                chosen.step()
                chosen.zero_grad()

        return Manual()

    incident = first_of(guard(lightning_fit(module)))
    assert incident.cause == "clip-before-unscale"
    hook = "def on_before_optimizer_step(self, optimizer): self.clip_gradients(optimizer, gradient_clip_val=0.1)"
    assert hook in incident.fixes[0].how


def test_what_is_proposed_for_lightning_is_healthy(guard: Guard) -> None:
    def module(lightning: Any) -> Any:
        class Clips(regression(lightning)):  # type: ignore[misc]
            def on_before_optimizer_step(self, optimizer: Any) -> None:
                nn.utils.clip_grad_norm_(self.parameters(), 0.1)

            def on_train_start(self) -> None:
                self.last_scale = 2.0**22

            def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
                scale = self.trainer.scaler.get_scale()
                if scale >= self.last_scale:
                    scheduler.step()
                self.last_scale = scale

        return Clips()

    run = guard(lightning_fit(module, scale=2.0**22))
    assert [i.cause for i in run.report.incidents] == ["loss-scale-overflow"]


def test_a_window_of_two_optimizers_in_lightning(guard: Guard) -> None:
    """The first one's overflow lowers the scale inside the window of the second."""

    def module(lightning: Any) -> Any:
        class TwoNets(lightning.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = False
                self.a, self.b = net(), net()

            def training_step(self, batch: Any, i: int) -> None:
                for model, optimizer, factor in zip((self.a, self.b), self.optimizers(), (1e3, 1.0), strict=True):
                    self.manual_backward(factor * nn.functional.mse_loss(model(batch[0]).float(), batch[1]))
                    if i % 2:
                        optimizer.step()
                        optimizer.zero_grad()

            def configure_optimizers(self) -> Any:
                return [torch.optim.SGD(model.parameters(), lr=1e-5) for model in (self.a, self.b)]

        return TwoNets()

    run = guard(lightning_fit(module, 2.0**14))
    incident = first_of(run)
    assert (incident.cause, incident.step) == ("accumulation-broken", 0)
    assert incident.fixes[0].how.startswith("Lightning updates after each optimizer's step.")
    assert all(i.cause in ("accumulation-broken", "loss-scale-overflow") for i in run.report.incidents)


def test_a_schedule_of_lightning(guard: Guard) -> None:
    incident = first_of(guard(lightning_fit(lambda lightning: regression(lightning)(), scale=2.0**40)))
    assert incident.cause == "scheduler-on-skipped-step"
    assert "def lr_scheduler_step(self, scheduler, metric)" in incident.fixes[0].how
    assert incident.explanation.count("trainer.fit(") == 1


# --- Fabric --------------------------------------------------------------------------------------------------------------


def fabric_and_scaler() -> tuple[Any, Any]:
    fabric = pytest.importorskip("lightning.fabric")
    from lightning.fabric.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    return fabric.Fabric(accelerator="cpu", devices=1, plugins=MixedPrecision("16-mixed", "cpu", scaler)), scaler


def fabric_loop(clips: str, folder: Path | None = None, keeps: bool = False) -> Callable[[], None]:
    def body() -> None:
        fabric, scaler = fabric_and_scaler()
        inner = net()
        model, opt = fabric.setup(inner, torch.optim.SGD(inner.parameters(), lr=0.05))
        for step, (x, y) in enumerate(batches()):
            opt.zero_grad()
            fabric.backward(nn.functional.mse_loss(model(x), y))
            if clips == "torch":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            elif clips == "fabric":
                fabric.clip_gradients(model, opt, max_norm=0.1)
            opt.step()
            if folder is not None and step == 2:
                state = {"model": model, "optimizer": opt} | ({"scaler": scaler} if keeps else {})
                fabric.save(folder / "last.ckpt", state)

    return body


def test_clipping_past_fabric(guard: Guard) -> None:
    incident = first_of(guard(fabric_loop("torch")))
    assert incident.cause == "clip-before-unscale"
    assert "fabric.clip_gradients(model, opt, max_norm=...)" in incident.fixes[0].how


def test_clipping_by_fabric_is_healthy(guard: Guard) -> None:
    assert guard(fabric_loop("fabric")).report.incidents == ()


def test_a_checkpoint_of_fabric(guard: Guard, tmp_path: Path) -> None:
    incident = first_of(guard(fabric_loop("", tmp_path)))
    assert incident.cause == "scaler-not-saved"
    assert '"scaler": scaler}' in incident.fixes[0].how
    assert "a stream" not in incident.explanation


def test_a_checkpoint_of_fabric_with_the_scaler(guard: Guard, tmp_path: Path) -> None:
    assert guard(fabric_loop("", tmp_path, keeps=True)).report.incidents == ()


# --- Accelerate ----------------------------------------------------------------------------------------------------------


def accelerate_loop(how: str, scale: float = SCALE) -> Callable[[], None]:
    accelerate = pytest.importorskip("accelerate")
    importlib.import_module("accelerate.state").AcceleratorState._reset_state(True)  # what another test left

    def body() -> None:
        accelerator = accelerate.Accelerator(mixed_precision="fp16", cpu=True)
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        inner = net()
        model, opt, data = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.05), batches())
        schedule = torch.optim.lr_scheduler.StepLR(opt.optimizer, 1)
        for x, y in data:
            loss = nn.functional.mse_loss(model(x).float(), y)
            loss.backward() if how == "raw" else accelerator.backward(loss)
            if how == "torch":
                nn.utils.clip_grad_value_(model.parameters(), 0.1)
            if how == "divides":
                for p in model.parameters():
                    p.grad.div_(accelerator.scaler.get_scale())  # type: ignore[union-attr]
                accelerator.clip_grad_norm_(model.parameters(), 10.0)
            if how == "raw":
                with pytest.raises(AssertionError, match="_scale is None"):
                    opt.step()
                return
            opt.step()
            if how == "schedule":
                schedule.step()
            opt.zero_grad()

    return body


@pytest.mark.parametrize(
    ("how", "scale", "cause", "words"),
    [
        ("torch", SCALE, "clip-before-unscale", "accelerator.clip_grad_value_(parameters, limit)"),
        ("raw", SCALE, "unscaled-backward", "accelerator.backward(loss)"),
        ("schedule", 2.0**40, "scheduler-on-skipped-step", "accelerator.optimizer_step_was_skipped"),
        ("divides", SCALE, "double-unscale", "leave out the division by hand"),
    ],
)
def test_the_words_of_accelerate(how: str, scale: float, cause: str, words: str, guard: Guard) -> None:
    incident = first_of(guard(accelerate_loop(how, scale)))
    assert incident.cause == cause
    assert words in incident.fixes[0].how


def test_a_loop_of_ones_own_keeps_its_words(guard: Guard) -> None:
    def body() -> None:
        model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=SCALE)
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        for x, y in batches():
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.mse_loss(model(x).float(), y)
            scaler.scale(loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # of scaled ones
            scaler.step(opt)
            scaler.update()

    how = first_of(guard(body)).fixes[0].how
    assert how == "unscale first: scaler.unscale_(opt); nn.utils.clip_grad_norm_(model.parameters(), 0.1)"
