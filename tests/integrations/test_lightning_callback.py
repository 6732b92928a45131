"""Schedulers that wait, the callback's logs and reports, and the guard over trainings with the plugin."""

from __future__ import annotations

import csv
import functools
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from digits_loops import furthest
from torch import Tensor
from torch.optim import lr_scheduler

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own, of many kinds
lightning = pytest.importorskip("lightning.pytorch")
pytest.importorskip("pytorch_lightning")

from lightning_modules import PACKAGES, classifier, fit, one_backward, own_plugin, several  # noqa: E402

import ampguard  # noqa: E402
from ampguard.integrations.lightning import GuardCallback, GuardedPrecision  # noqa: E402
from ampguard.report.store import read_report  # noqa: E402

PL = PACKAGES[0]
guarded = functools.partial(GuardedPrecision, "16-mixed", "cpu")

# --- schedulers -------------------------------------------------------------------------------------------------------


def halving(interval: str) -> Any:
    def made(optimizer: torch.optim.Optimizer) -> Any:
        return {"scheduler": lr_scheduler.StepLR(optimizer, 1, gamma=0.5), "interval": interval}

    return made


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    """Halves the rate whenever it is stepped: the loss of the first batch is never undercut."""
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=-1, threshold=1e9)
    return {"scheduler": scheduler, "interval": "step", "monitor": "loss"}


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("scheduler", [halving("step"), plateau], ids=["StepLR", "ReduceLROnPlateau"])
def test_schedulers_wait_for_skipped_steps(scheduler: Any, package: str) -> None:
    theirs, ours = classifier(package, scheduler=scheduler), classifier(package, scheduler=scheduler)
    fit(package, theirs, own_plugin(package), batches=5, bad=(1, 2))
    fit(package, ours, guarded(), batches=5, bad=(1, 2))
    theirs_halved, ours_halved = ([0, 1, 2, 3, 4], [0, 1, 1, 1, 2])  # batches 1 and 2 are skipped
    if scheduler is not plateau:  # which is stepped after the batch's end
        theirs_halved, ours_halved = ([1, 2, 3, 4, 5], [1, 1, 1, 2, 3])
    assert theirs.rates == [1e-3 / 2**times for times in theirs_halved]
    assert ours.rates == [1e-3 / 2**times for times in ours_halved]


def test_a_whole_epoch_of_skipped_steps() -> None:
    module = classifier(PL, scheduler=halving("epoch"))
    fit(PL, module, guarded(patience=None), batches=2, bad=(0, 1), max_epochs=2)
    assert module.rates == [1e-3] * 4
    assert module.lr_schedulers().last_epoch == 0


def test_schedulers_called_by_hand() -> None:
    def scheduled(module: Any, optimizers: list[Any], losses: list[Tensor], number: int) -> None:
        one_backward(module, optimizers, losses, number)
        module.lr_schedulers().step()

    module = several(PL, step=scheduled, lr=1.0, burst=((1, 0),), scheduler=lambda o: lr_scheduler.StepLR(o, 1, 0.5))
    fit(PL, module, guarded(), batches=4)
    assert module.optimizers()[0].param_groups[0]["lr"] == 1 / 8  # of four steps, three were made


def test_a_scheduler_is_as_it_was_afterwards(tmp_path: Path) -> None:
    module = classifier(PL, scheduler=halving("step"))
    trainer = fit(PL, module, guarded(), batches=3)
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    assert type(scheduler) is lr_scheduler.StepLR
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)["lr_schedulers"][0]
    plain = lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], 1.0), 1).state_dict()
    assert saved.keys() == plain.keys()


# --- logs and reports -------------------------------------------------------------------------------------------------


def logged(folder: Path) -> list[dict[str, str]]:
    rows = list(csv.DictReader((folder / "logs/version_0/metrics.csv").open()))
    return [row for row in rows if row.get("ampguard/skipped_steps")]


@pytest.mark.parametrize("package", PACKAGES)
def test_scale_norm_and_skipped_steps_are_logged(package: str, tmp_path: Path) -> None:
    logger = importlib.import_module(f"{package}.loggers").CSVLogger(tmp_path, "logs")
    module = classifier(package)
    fit(package, module, guarded(), 6, (3,), logger=logger, callbacks=[GuardCallback()], log_every_n_steps=2)
    rows = logged(tmp_path)
    assert [float(row["ampguard/loss_scale"]) for row in rows] == [65536.0, 32768.0, 32768.0]
    assert [float(row["ampguard/skipped_steps"]) for row in rows] == [0, 1, 1]
    assert [bool(row["ampguard/grad_norm"]) for row in rows] == [True, False, True]  # the second is not finite
    assert 0.01 < float(rows[0]["ampguard/grad_norm"]) < 100


def test_of_several_optimizers_each_norm_is_logged(tmp_path: Path) -> None:
    logger = lightning.loggers.CSVLogger(tmp_path, "logs")
    module = several(PL)
    fit(PL, module, guarded(), 2, logger=logger, callbacks=[GuardCallback()], log_every_n_steps=2)
    (row,) = logged(tmp_path)
    assert [float(row[f"ampguard/grad_norm/{i}"]) for i in range(3)] == pytest.approx(module.norms[1], rel=1e-5)


def test_bfloat16_logs_the_norm_before_clipping(tmp_path: Path) -> None:
    logger = lightning.loggers.CSVLogger(tmp_path, "logs")
    plugin = GuardedPrecision("bf16-mixed", "cpu")
    words = {"gradient_clip_val": 1e-3, "callbacks": [GuardCallback()], "log_every_n_steps": 1}
    fit(PL, classifier(PL), plugin, 2, logger=logger, **words)
    assert all(float(row["ampguard/grad_norm"]) > 0.01 for row in logged(tmp_path))
    assert "ampguard/loss_scale" not in logged(tmp_path)[0]


def test_a_report_of_ones_own_guard(tmp_path: Path) -> None:
    callback = GuardCallback(watch=True)
    module = classifier(PL)
    fit(PL, module, guarded(), 6, (3,), callbacks=[callback], default_root_dir=tmp_path)
    assert ampguard.guarding() is None
    assert callback.report_path == tmp_path / "ampguard" / "report.json"
    report = read_report(callback.report_path)
    (incident,) = [i for i in report.incidents if i.severity == "error"]
    assert (incident.cause, incident.step, incident.module) == ("fp16-overflow", 3, "net.0")
    fit(PL, module, guarded(), 2, callbacks=[callback], default_root_dir=tmp_path)
    assert callback.report_path == tmp_path / "ampguard-2" / "report.json"


def test_a_report_of_a_training_that_fails(tmp_path: Path) -> None:
    callback = GuardCallback(watch=True)
    module = classifier(PL)
    step = module.training_step

    def failing(batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            raise KeyError("the script's own")
        return step(batch, batch_idx)

    module.training_step = failing
    with pytest.raises(KeyError, match="the script's own"):
        fit(PL, module, guarded(), 6, (2,), callbacks=[callback], default_root_dir=tmp_path)
    assert ampguard.guarding() is None
    assert [i.cause for i in read_report(tmp_path / "ampguard").incidents if i.severity == "error"] == ["fp16-overflow"]


def test_the_report_of_a_guard_that_goes_on(tmp_path: Path) -> None:
    callback = GuardCallback(watch=True)
    with ampguard.watch(out=tmp_path / "run") as session:
        fit(PL, classifier(PL), guarded(), 6, (3,), callbacks=[callback])
        assert ampguard.guarding() is session
        assert callback.report_path == tmp_path / "run" / "report.json"
        assert [i.step for i in read_report(callback.report_path).incidents if i.severity == "error"] == [3]
        fit(PL, classifier(PL), guarded(), 6, callbacks=[callback])
    assert [i.step for i in session.report.incidents if i.severity == "error"] == [3]


def test_without_a_guard_and_without_our_plugin(tmp_path: Path) -> None:
    logger = lightning.loggers.CSVLogger(tmp_path, "logs")
    callback = GuardCallback()
    fit(PL, classifier(PL), own_plugin(PL), 4, logger=logger, callbacks=[callback], log_every_n_steps=2)
    rows = list(csv.DictReader((tmp_path / "logs/version_0/metrics.csv").open()))
    assert [row["ampguard/loss_scale"] for row in rows if row["ampguard/loss_scale"]] == ["65536.0"] * 2
    assert callback.report_path is None


# --- under the guard --------------------------------------------------------------------------------------------------


def clip_by_hand(module: Any, optimizers: list[Any], losses: list[Tensor], number: int) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    module.manual_backward(torch.stack(losses).sum())
    for optimizer in optimizers:
        module.clip_gradients(optimizer, gradient_clip_val=0.05)
        optimizer.step()


def one_after_the_other(module: Any, optimizers: list[Any], losses: list[Tensor], number: int) -> None:
    for optimizer, loss in zip(optimizers, losses, strict=True):
        optimizer.zero_grad()
        module.manual_backward(loss)
        optimizer.step()


def in_turns(module: Any, optimizers: list[Any], losses: list[Tensor], number: int) -> None:
    chosen = slice(0, 1) if number % 2 else slice(1, 3)
    one_after_the_other(module, optimizers[chosen], losses[chosen], number)


HEALTHY: list[tuple[str, Any]] = [
    ("automatic", lambda: (classifier(PL, scheduler=halving("step")), {})),
    ("clipped windows", lambda: (classifier(PL), {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2})),
    ("plateau", lambda: (classifier(PL, scheduler=plateau), {})),
    ("one backward", lambda: (several(PL, lr=0.1), {})),
    ("clipped by hand", lambda: (several(PL, step=clip_by_hand, lr=0.1), {})),
    ("one after the other", lambda: (several(PL, step=one_after_the_other, lr=0.1), {})),
    ("in turns", lambda: (several(PL, step=in_turns, lr=0.1), {})),
]


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
@pytest.mark.parametrize(("name", "make"), HEALTHY, ids=[name for name, _ in HEALTHY])
def test_healthy_trainings_are_silent_and_unchanged(name: str, make: Any, precision: str, tmp_path: Path) -> None:
    alone, words = make()
    fit(PL, alone, GuardedPrecision(precision, "cpu"), batches=8, **words)
    watched, words = make()
    with ampguard.watch(out=tmp_path / "run") as session:
        fit(PL, watched, GuardedPrecision(precision, "cpu"), batches=8, callbacks=[GuardCallback()], **words)
    assert session.report.incidents == ()
    assert furthest(alone, watched) == 0.0


@pytest.mark.parametrize("name", ["automatic", "plateau", "clipped windows"])
def test_a_bad_batch_is_the_only_incident(name: str, tmp_path: Path) -> None:
    module, words = dict(HEALTHY)[name]()
    with ampguard.watch(out=tmp_path / "run") as session:
        fit(PL, module, guarded(), batches=8, bad=(5,), **words)
    (incident,) = session.report.incidents
    expected = 2 if name == "clipped windows" else 5
    assert (incident.cause, incident.step, incident.module) == ("fp16-overflow", expected, "net.0")


def test_the_scale_that_settles_is_a_note(tmp_path: Path) -> None:
    with ampguard.watch(out=tmp_path / "run") as session:
        module = several(PL, step=one_after_the_other, lr=0.1)
        fit(PL, module, guarded(init_scale=2.0**127), batches=8)
    assert {i.severity for i in session.report.incidents} <= {"info"}
