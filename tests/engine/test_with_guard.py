"""The guard sees an Amp's steps for what they are: `ampguard run` on a script that uses it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from engine_loops import loss_of, made, model_of, same, train, weights
from torch import nn

import ampguard
import warm
from ampguard.report.store import read_report

SCRIPT = """
import sys, torch, ampguard
from torch import nn

precision, bad = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(8, 32), nn.Linear(32, 1)

    def forward(self, x):
        return self.head(torch.relu(self.inner(x)) * 64)


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
amp = ampguard.Amp(model, optimizer, precision, max_grad_norm=1.0, init_scale=8.0)
for step in range(20):
    x = torch.randn(16, 8)
    y = x[:, :1] * 2
    if step == bad:
        x = x * 1e4
    with amp.autocast():
        loss = nn.functional.mse_loss(model(x), y)
    amp.backward(loss)
    amp.step()
print("made", amp.steps)
"""


def guarded(tmp_path: Path, precision: str, bad: int = -1) -> tuple[str, ampguard.Report]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "ampguard",
        "run",
        "--out",
        str(tmp_path / "run"),
        str(script),
        precision,
        str(bad),
    ]
    ran = warm.run(command, check=True)
    return ran.stdout, read_report(tmp_path / "run")


@pytest.mark.parametrize("precision", ["fp16", "bf16-true"])
def test_a_healthy_run_is_silent(precision: str, tmp_path: Path) -> None:
    out, report = guarded(tmp_path, precision)
    assert out == "made 20\n"
    assert report.incidents == ()
    assert report.steps == 20


@pytest.mark.parametrize("precision", ["fp16", "O2"])
def test_an_overflow_is_found_in_its_step(precision: str, tmp_path: Path) -> None:
    out, report = guarded(tmp_path, precision, bad=7)
    assert out == "made 19\n"
    (incident,) = [i for i in report.incidents if i.severity == "error"]
    assert (incident.cause, incident.step) == ("fp16-overflow", 7)


def test_a_settling_scale_is_a_note(tmp_path: Path) -> None:
    with ampguard.watch(out=tmp_path / "run") as session:
        amp = made("fp16", init_scale=2.0**24)
        train(amp, range(15))
    assert amp.steps < 15
    assert {i.cause for i in session.report.incidents} == {"loss-scale-overflow"}
    assert {i.severity for i in session.report.incidents} == {"info"}


@pytest.mark.parametrize("mode", ["fp16", "O2"])
def test_watching_changes_nothing(mode: str, tmp_path: Path) -> None:
    alone = made(mode, accumulate=2, max_grad_norm=1.0, init_scale=2.0**18)
    losses = train(alone, range(16))
    with ampguard.watch(out=tmp_path / "run"):
        watched = made(mode, accumulate=2, max_grad_norm=1.0, init_scale=2.0**18)
        assert train(watched, range(16)) == losses
    assert same(weights(alone), weights(watched))
    assert alone.get_scale() == watched.get_scale()


def unscaled_by_hand(amp: ampguard.Amp, steps: range) -> None:
    for step in steps:
        amp.backward(loss_of(amp, step))
        amp.unscale_()
        nn.utils.clip_grad_value_(list(model_of(amp).parameters()), 0.5)
        amp.step()


def test_unscaling_by_hand_is_seen_once(tmp_path: Path) -> None:
    alone = made("fp16")
    unscaled_by_hand(alone, range(12))
    with ampguard.watch(out=tmp_path / "run") as session:
        watched = made("fp16")
        unscaled_by_hand(watched, range(12))
    assert session.report.incidents == ()
    assert same(weights(alone), weights(watched))


def test_a_resumed_scale_is_seen_as_it_is(tmp_path: Path) -> None:
    """Saved at another scale than a new engine begins with: neither the steps nor the report are wrong afterwards."""
    before = made("fp16", init_scale=64.0)
    train(before, range(4))
    torch.save(before.state_dict(), tmp_path / "state.pt")
    train(before, range(4, 12))
    with ampguard.watch(out=tmp_path / "run") as session:
        after = made("fp16", init_scale=4096.0)
        train(after, range(2))
        after.load_state_dict(torch.load(tmp_path / "state.pt"))
        train(after, range(4, 12))
    assert session.report.incidents == ()
    assert same(weights(before), weights(after))
    assert after.get_scale() == before.get_scale()


@pytest.mark.parametrize("override", [["--precision", "bf16"], ["--disable-amp"]])
def test_an_override_that_switches_scalers_off_is_survived(override: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "ampguard", "run", *override, "--out", str(tmp_path / "run"), str(script)]
    ran = warm.run([*command, "fp16", "-1"], check=True)
    assert ran.stdout == "made 20\n"
    assert "Traceback" not in ran.stderr
