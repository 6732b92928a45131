"""The guard sees a drop-in's steps for what they are: silent on healthy runs, right on broken ones, nothing changed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from contiguous_params import ContiguousParams
from digits_loops import batches, furthest, network, train
from torch import Tensor, nn

import ampguard
import warm
from ampguard.integrations.d2 import AMPTrainer
from ampguard.integrations.timm import NativeScaler, NativeScalerWithGradNormCount
from ampguard.report.store import read_report

HEALTHY: list[dict[str, Any]] = [
    {},
    {"window": 4, "clip_grad": 1.0},
    {"clip_grad": 0.02, "clip_mode": "agc"},
    {"window": 2, "clip_grad": 0.01, "clip_mode": "value"},
    {"precision": "bf16", "clip_grad": 1.0},
]


def run(precision: str = "fp16", init_scale: float = 2.0**14, **words: Any) -> nn.Module:
    model = network()
    scaler = NativeScalerWithGradNormCount(precision=precision, init_scale=init_scale)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    train(scaler, model, torch.optim.AdamW(model.parameters(), 1e-3), 12, dtype=dtype, **words)
    return model


@pytest.mark.parametrize("words", HEALTHY, ids=str)
def test_healthy_runs_are_silent_and_unchanged(words: dict[str, Any], tmp_path: Path) -> None:
    alone = run(**words)
    with ampguard.watch(out=tmp_path / "run") as session:
        watched = run(**words)
    assert session.report.incidents == ()
    assert session.report.steps == 12
    assert furthest(alone, watched) == 0.0


def test_a_settling_scale_is_a_note(tmp_path: Path) -> None:
    with ampguard.watch(out=tmp_path / "run") as session:
        run(init_scale=2.0**24, clip_grad=1.0)
    assert {(i.cause, i.severity) for i in session.report.incidents} == {("loss-scale-overflow", "info")}


@pytest.mark.parametrize("mode", ["norm", "value"])
def test_an_overflow_is_found_in_its_step(mode: str, tmp_path: Path) -> None:
    with ampguard.watch(out=tmp_path / "run") as session:
        run(window=3, bad=(16,), clip_grad=0.1, clip_mode=mode)
    (incident,) = [i for i in session.report.incidents if i.severity == "error"]
    assert (incident.cause, incident.step, incident.module) == ("fp16-overflow", 5, "0")


class Losses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, data: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.body(data[0]), data[1])}


@pytest.mark.parametrize("is_flat", [False, True])
def test_the_trainer_too(is_flat: bool, tmp_path: Path) -> None:
    def trained() -> nn.Module:
        model = Losses()
        wrapper = ContiguousParams(model) if is_flat else None
        optimizer = torch.optim.AdamW(wrapper.contiguous() if wrapper else model.parameters(), 1e-3)
        AMPTrainer(model, list(batches(12)), optimizer, *([wrapper] if wrapper else [])).train(0, 12)
        return model

    alone = trained()
    with ampguard.watch(out=tmp_path / "run") as session:
        watched = trained()
    assert session.report.incidents == ()
    assert furthest(alone, watched) == 0.0


def test_saving_and_resuming_are_no_incidents(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer, NativeScaler]:
        model = network()
        return model, torch.optim.AdamW(model.parameters(), 1e-3), NativeScaler(init_scale=512.0)

    with ampguard.watch(out=tmp_path / "first") as first:
        model, optimizer, scaler = made()
        train(scaler, model, optimizer, 6)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
        torch.save(state, tmp_path / "checkpoint.pt")
    with ampguard.watch(out=tmp_path / "second") as second:
        model, optimizer, scaler = made()
        saved = torch.load(tmp_path / "checkpoint.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scaler.load_state_dict({**saved["scaler"], "scale": 2048.0})
        norms = train(scaler, model, optimizer, 6)
    assert (first.report.incidents, second.report.incidents) == ((), ())
    assert scaler.get_scale() == 2048.0
    assert all(norm is not None and 0.05 < norm < 20 for norm in norms)  # divided by what they were multiplied with


SCRIPT = """
import sys
from digits_loops import network, train
import torch
from ampguard.integrations.timm import NativeScaler

model = network()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
scaler = NativeScaler(init_scale=2.0**14)
train(scaler, model, optimizer, 10, word="need_update", clip_grad=1.0, bad=(6,))
print(scaler.get_scale())
"""


@pytest.mark.parametrize(
    ("options", "scale", "expected"),
    [([], "8192.0", [("fp16-overflow", 6)]), (["--precision", "bf16"], "1.0", [])],
)
def test_the_command_line(options: list[str], scale: str, expected: list[tuple[str, int]], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "ampguard", "run", *options, "--out", str(tmp_path / "run"), str(script)]
    source = Path(ampguard.__file__).parents[1]
    environment = {"PYTHONPATH": f"{Path(__file__).parent}:{source}", "PATH": "", "OMP_NUM_THREADS": "1"}
    ran = warm.run(command, check=True, env=environment)
    assert ran.stdout == f"{scale}\n"
    report = read_report(tmp_path / "run")
    assert [(i.cause, i.step) for i in report.incidents if i.severity == "error"] == expected
