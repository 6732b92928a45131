"""`prepare(trainer)` and `GuardCallback` with the real transformers Trainer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from digits_loops import IMAGES, LABELS, furthest, network
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from transformers import Trainer, TrainingArguments  # noqa: E402

import ampguard  # noqa: E402
from ampguard.integrations.hf import AcceleratedScaler, GuardCallback, prepare  # noqa: E402
from ampguard.report.store import read_report  # noqa: E402

BATCH = 16


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, images: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.net(images)
        return {"loss": nn.functional.cross_entropy(logits.float(), labels), "logits": logits}


def digits(batches: int, bad: tuple[int, ...] = ()) -> list[dict[str, Tensor]]:
    """In order; the batches in `bad` are too bright for float16."""
    return [
        {"images": IMAGES[i] * (1e6 if i // BATCH in bad else 1), "labels": LABELS[i]} for i in range(batches * BATCH)
    ]


class InOrder(Trainer):
    def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
        return None


def trainer_on(
    folder: Path,
    *,
    batches: int = 6,
    bad: tuple[int, ...] = (),
    kind: Any = InOrder,
    callbacks: Any = None,
    **words: Any,
) -> Any:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    options: dict[str, Any] = {
        "use_cpu": True,
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
    }
    arguments = TrainingArguments(str(folder), **{**options, **words})
    return kind(Classifier(), arguments, train_dataset=digits(batches, bad), callbacks=callbacks)


def rows(trainer: Any) -> list[dict[str, Any]]:
    return [row for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("words", [{}, {"gradient_accumulation_steps": 2}, {"max_grad_norm": 0.0}], ids=str)
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_it_learns_as_the_trainers_own(precision: str, words: dict[str, Any], tmp_path: Path) -> None:
    flags = {} if precision == "fp32" else {precision: True}
    theirs = trainer_on(tmp_path / "theirs", **flags, **words)
    if precision == "fp16":  # as on a GPU; on the CPU it is float32
        theirs.accelerator.native_amp, theirs.accelerator.scaler = True, torch.amp.GradScaler("cpu")
    ours = trainer_on(tmp_path / "ours", **flags, **words)
    prepare(ours)
    theirs.train()
    ours.train()
    assert furthest(theirs.model, ours.model) < 1e-6
    assert [row["loss"] for row in rows(ours)] == pytest.approx([row["loss"] for row in rows(theirs)], rel=1e-4)
    norms = [[row["grad_norm"] for row in rows(trainer)] for trainer in (ours, theirs)]
    assert norms[0] == pytest.approx(norms[1], rel=2e-3)


def test_float16_skips_and_logs_and_schedules(tmp_path: Path) -> None:
    trainer = trainer_on(tmp_path, bad=(2,), fp16=True)
    scaler = prepare(trainer)
    trainer.train()
    assert isinstance(scaler, AcceleratedScaler)
    assert [row["loss_scale"] for row in rows(trainer)] == [65536.0] * 2 + [32768.0] * 4
    assert [row["skipped_steps"] for row in rows(trainer)] == [0, 0, 1, 1, 1, 1]
    assert [row["nonfinite_losses"] for row in rows(trainer)] == [0, 0, 1, 1, 1, 1]
    assert trainer.lr_scheduler.last_epoch == 5  # waited once


def test_the_callback_comes_before_those_that_report(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []

    class Tracker(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            seen.append(dict(logs))

    trainer = trainer_on(tmp_path, fp16=True, callbacks=[Tracker(), GuardCallback()])
    prepare(trainer)
    assert sum(isinstance(c, GuardCallback) for c in trainer.callback_handler.callbacks) == 1
    trainer.train()
    assert seen[0]["loss_scale"] == 65536.0


@pytest.mark.parametrize("prepares", [True, False])
@pytest.mark.parametrize("hides", [True, False])
def test_hidden_losses_are_found(prepares: bool, hides: bool, tmp_path: Path, caplog: Any) -> None:
    trainer = trainer_on(
        tmp_path, bad=(3,), fp16=prepares, bf16=False, callbacks=[GuardCallback()], logging_nan_inf_filter=hides
    )
    if prepares:
        prepare(trainer)
    else:  # float32, and a model that says NaN by itself
        net = trainer.model.net
        net.register_forward_hook(lambda _, given, out: out * (float("nan") if given[0].max() > 10 else 1))
    with caplog.at_level(logging.WARNING, "ampguard"):
        trainer.train()
    first = rows(trainer)[3]
    assert (first["loss"] == first["loss"]) is hides  # a NaN is not itself
    assert first["nonfinite_losses"] == 1
    (told,) = [r.getMessage() for r in caplog.records if "by step 4" in r.getMessage()]
    assert told.startswith("by step 4: 1 loss that is not finite")
    assert ("logging_nan_inf_filter" in told) is hides
    assert "ampguard run" in told


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    class OwnLoss(InOrder):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            logits = model.net(inputs["images"])
            return nn.functional.cross_entropy(logits.float(), inputs["labels"]) * (
                float("inf") if inputs["images"].max() > 10 else 1
            )

    trainer = trainer_on(tmp_path, bad=(1,), bf16=True, kind=OwnLoss)
    prepare(trainer)
    trainer.train()
    assert [row["nonfinite_losses"] for row in rows(trainer)] == [0, 1, 1, 1, 1, 1]
    assert not any(bool(p.isnan().any()) for p in trainer.model.parameters())


@pytest.mark.parametrize("direction", ["theirs to ours", "ours to theirs", "ours to ours"])
def test_checkpoints_are_exchanged(direction: str, tmp_path: Path) -> None:
    def made(kind: str, epochs: int) -> Any:
        trainer = trainer_on(tmp_path, bad=(1,), fp16=True, save_strategy="epoch", num_train_epochs=epochs)
        if kind == "ours":
            prepare(trainer)
        else:
            trainer.accelerator.native_amp, trainer.accelerator.scaler = True, torch.amp.GradScaler("cpu")
        return trainer

    first, second = direction.split(" to ")
    made(first, 1).train()
    resumed = made(second, 2)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 12
    assert resumed.accelerator.scaler.get_scale() == 16384.0  # halved once before and once after


def test_the_report_is_written(tmp_path: Path) -> None:
    callback = GuardCallback(watch=True)
    trainer = trainer_on(tmp_path, bad=(3,), fp16=True, callbacks=[callback])
    prepare(trainer)
    trainer.train()
    assert ampguard.guarding() is None
    assert callback.report_path == tmp_path / "ampguard" / "report.json"
    (incident,) = [i for i in read_report(callback.report_path).incidents if i.severity == "error"]
    assert (incident.cause, incident.step, incident.module) == ("fp16-overflow", 3, "net.0")


def test_a_training_that_fails_leaves_its_report_with_the_next(tmp_path: Path) -> None:
    class Failing(InOrder):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 4:
                raise KeyError("the script's own")
            return super().training_step(*args, **kwargs)

    callback = GuardCallback(watch=True)
    trainer = trainer_on(tmp_path, bad=(3,), fp16=True, callbacks=[callback], kind=Failing)
    prepare(trainer)
    with pytest.raises(KeyError, match="the script's own"):
        trainer.train()
    callback.on_train_begin(trainer.args, trainer.state, trainer.control)
    assert [i.cause for i in read_report(tmp_path / "ampguard").incidents if i.severity == "error"] == ["fp16-overflow"]
    callback.on_train_end(trainer.args, trainer.state, trainer.control)
    assert ampguard.guarding() is None


@pytest.mark.parametrize("words", [{}, {"gradient_accumulation_steps": 2}], ids=str)
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_healthy_trainings_are_silent_and_unchanged(precision: str, words: dict[str, Any], tmp_path: Path) -> None:
    flags = {} if precision == "fp32" else {precision: True}

    def trained() -> nn.Module:
        trainer = trainer_on(tmp_path, **flags, **words)
        prepare(trainer)
        trainer.train()
        return trainer.model

    alone = trained()
    with ampguard.watch(out=tmp_path / "run") as session:
        watched = trained()
    assert session.report.incidents == ()
    assert furthest(alone, watched) == 0.0
