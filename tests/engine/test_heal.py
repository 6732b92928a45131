"""`Amp(on_nonfinite="heal")`: the guard applies the fix, whoever has started it."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from engine_loops import MODES
from torch import Tensor, nn

import ampguard
import warm
from ampguard.errors import RunFolderError
from ampguard.report.store import read_report
from ampguard.run.session import RunOptions, Session

LOOP = """
import sys, torch, ampguard
from torch import nn

precision = sys.argv[1]


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        scores = (300 * self.query(x)) @ (300 * self.key(x)).transpose(-2, -1)
        return torch.softmax(scores / 90000, -1) @ x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.attention, self.head = nn.Linear(8, 16), Scores(), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.attention(self.embed(x)).mean(1))


torch.manual_seed(4)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
amp = ampguard.Amp(model, optimizer, precision, on_nonfinite="heal", max_grad_norm=10.0, init_scale=64.0)
x, y = torch.randn(16, 6, 8), torch.randint(0, 4, (16,))
for _ in range(30):
    with amp.autocast():
        loss = nn.functional.cross_entropy(model(x), y)
    amp.backward(loss)
    amp.step()
print(amp.steps, loss.item())
"""


def ran(folder: Path, *command: str) -> tuple[int, float, str]:
    """(steps made, last loss, stderr) of the loop."""
    (folder / "train.py").write_text(LOOP)
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = warm.run([sys.executable, *command], cwd=folder, env=env, check=True)
    made, loss = done.stdout.split()
    return int(made), float(loss), done.stderr


def test_it_simply_works(tmp_path: Path) -> None:
    """No guard runs: the engine starts one, which reports when the process ends."""
    _, exact, said = ran(tmp_path, "train.py", "fp32")
    assert "healed" not in said
    made, healed, said = ran(tmp_path, "train.py", "fp16")
    assert made == 30  # the failing call was made again: no step was lost
    assert healed == pytest.approx(exact, rel=0.02)
    assert said.count("healed, attention in float32 from now on") == 1
    (folder,) = [f for f in (tmp_path / "ampguard-runs").iterdir() if read_report(f).status != "clean"]
    assert [h["target"] for h in read_report(folder).run["healed"]] == ["attention"]


@pytest.mark.parametrize("asked", ["observe", "skip", "heal"])
def test_under_ampguard_run_it_asks_that_guard(asked: str, tmp_path: Path) -> None:
    command = ["-m", "ampguard", "run", "--out", "run", "--on-nonfinite", asked, "train.py", "fp16"]
    made, healed, said = ran(tmp_path, *command)
    assert made == 30
    assert healed < 1.4
    assert said.count("healed, attention in float32 from now on") == 1
    assert not (tmp_path / "ampguard-runs").exists()
    assert len(read_report(tmp_path / "run").run["healed"]) == 1


class Wide(nn.Module):
    """Its product fits no float16."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) * 3000) @ torch.full((8, 1), 300.0) / 1e6


def healing() -> tuple[ampguard.Amp, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(Wide(), nn.Identity())
    amp = ampguard.Amp(model, torch.optim.SGD(model.parameters(), 0.01), on_nonfinite="heal", init_scale=8.0)
    return amp, model


def one_step(amp: ampguard.Amp, model: nn.Module) -> bool:
    with amp.autocast():
        loss = model(torch.randn(4, 8)).float().square().mean()
    amp.backward(loss)
    return amp.step().stepped


def test_a_settling_loss_scale_is_no_failure(tmp_path: Path) -> None:
    """The optimizer is older than the guard that the engine starts."""
    session = Session(RunOptions(out=tmp_path / "run"))
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session.start()
    try:
        amp = ampguard.Amp(model, optimizer, on_nonfinite="heal", init_scale=2.0**22)
        for _ in range(12):
            with amp.autocast():
                loss = model(torch.randn(16, 8)).square().mean()
            amp.backward(loss)
            amp.step()
    finally:
        session.finish()
    assert 0 < amp.steps < 12
    assert amp.get_scale() < 2.0**22
    assert session.report.run["healed"] == []
    assert {i.severity for i in session.report.incidents} <= {"info"}


def test_a_guard_of_its_own_ends_with_the_last_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    original = nn.Module.__call__
    first, model = healing()
    guard = ampguard.guarding()
    assert guard is not None
    second, _ = healing()
    assert ampguard.guarding() is guard
    assert one_step(first, model)  # made again with the fix, not skipped
    del first
    gc.collect()
    assert ampguard.guarding() is guard
    del second
    gc.collect()
    assert ampguard.guarding() is None
    assert nn.Module.__call__ is original
    assert guard.report is not None
    assert {i.cause for i in guard.report.incidents} == {"fp16-overflow"}


@pytest.mark.parametrize("how", ["close", "with", "with an error"])
def test_a_guard_of_its_own_ends_when_the_engine_is_closed(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    amp, model = healing()
    if how == "close":
        one_step(amp, model)
        amp.close()
        amp.close()
    else:
        with contextlib.suppress(KeyError), amp:
            one_step(amp, model)
            if how == "with an error":
                raise KeyError("end")
    assert ampguard.guarding() is None
    (report,) = tmp_path.glob("ampguard-runs/*/report.json")
    steps = read_report(report.parent).steps
    assert steps > 0
    one_step(amp, model)  # unguarded
    assert read_report(report.parent).steps == steps
    del amp
    gc.collect()
    assert ampguard.guarding() is None


def test_the_last_of_several_engines_to_be_closed_ends_the_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (first, _), (second, _) = healing(), healing()
    first.close()
    assert ampguard.guarding() is not None
    del first
    gc.collect()
    assert ampguard.guarding() is not None
    second.close()
    assert ampguard.guarding() is None


def test_a_guard_of_others_outlives_it(tmp_path: Path) -> None:
    with ampguard.watch(out=tmp_path / "run") as session:
        assert ampguard.guarding() is session
        amp, model = healing()
        assert one_step(amp, model)  # made again with the fix, not skipped
        del amp
        gc.collect()
        assert ampguard.guarding() is session
    assert ampguard.guarding() is None
    assert len(session.report.run["healed"]) == 1


def test_what_cannot_be_healed_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    session = Session(RunOptions(out=tmp_path / "run"))
    session.start()
    try:
        model = nn.Linear(8, 1)
        amp = ampguard.Amp(model, torch.optim.SGD(model.parameters(), 0.1), "bf16", on_nonfinite="heal")
        before = model.weight.clone()
        amp.backward(model(torch.randn(4, 8)).mean() / torch.zeros(()))
        assert amp.step().skipped
        assert torch.equal(before, model.weight)
        assert "skipped (1 in a row" in caplog.text
    finally:
        session.finish()


@pytest.mark.parametrize("precision", MODES)
def test_a_batch_that_cannot_be_healed_leaves_the_statistics_as_they_were(precision: str, tmp_path: Path) -> None:
    session = Session(RunOptions(out=tmp_path / "run"))
    session.start()
    try:
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        amp = ampguard.Amp(
            model, torch.optim.SGD(model.parameters(), 0.1), precision, on_nonfinite="heal", init_scale=8.0
        )
        for number in range(4):
            x = torch.randn(16, 8)
            x[0, 0] = torch.nan if number == 2 else 0.0
            before = {name: buffer.clone() for name, buffer in model.named_buffers()}
            with amp.autocast():
                loss = model(x).float().square().mean()
            amp.backward(loss)
            assert amp.step().skipped is (number == 2)
            unchanged = [torch.equal(buffer, before[name]) for name, buffer in model.named_buffers()]
            assert all(unchanged) if number == 2 else not any(unchanged)
    finally:
        session.finish()


class Scaled(nn.Module):
    """A product that fits float16 while its input is small."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.normed = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.normed(self.inner(x) * self.inner(x))


class Choosy(Scaled):
    """Its own code works under autocast only, which a replay is not told."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_autocast_enabled("cpu") and not in_replay():
            raise TypeError("autocast only")
        return super().forward(x)


def in_replay() -> bool:
    """Whether the guard is running the step again."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and "replay" not in Path(frame.f_code.co_filename).parts:
        frame = frame.f_back
    return frame is not None


def skipped_in_steps(
    model: Scaled, precision: str, session: Session, sizes: tuple[float, ...] = (1.0, 3000.0, 1.0)
) -> list[bool]:
    session.start()
    try:
        amp = ampguard.Amp(
            model, torch.optim.SGD(model.parameters(), 0.01), precision, on_nonfinite="heal", init_scale=8.0
        )
        skipped = []
        for size in sizes:
            model.normed.reset_running_stats()
            with amp.autocast():
                loss = model(size * torch.randn(16, 8)).square().mean()
            amp.backward(loss)
            skipped.append(amp.step().skipped)
    finally:
        session.finish()
    return skipped


@pytest.mark.parametrize("precision", ["O2", "O3"])
def test_weights_in_float16_are_healed_by_casts_of_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], precision: str
) -> None:
    """Another autocast would not help."""
    torch.manual_seed(0)
    session = Session(RunOptions(out=tmp_path / "run"))
    model = Scaled()
    assert skipped_in_steps(model, precision, session) == [False, False, False]
    said = capfd.readouterr().err
    assert "healed, float16 weights run as float32 casts from now on" in said
    assert "bfloat16 from now on" not in said
    assert model.inner.weight.dtype == torch.float16


class HalfOnly(Scaled):
    """Its own code asks for float16."""

    def forward(self, x: Tensor) -> Tensor:
        if self.inner.weight.dtype != torch.float16 and not in_replay():
            raise TypeError("float16 only")
        return super().forward(x)


def test_casts_that_the_model_does_not_bear_are_taken_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    session = Session(RunOptions(out=tmp_path / "run"))
    model = HalfOnly()
    assert skipped_in_steps(model, "O3", session) == [False, True, False]
    assert "not healed after all" in capfd.readouterr().err
    assert session.report.run["healed"] == []
    assert {t.dtype for t in model.state_dict().values() if t.is_floating_point()} == {torch.float16}


def test_a_fix_that_the_model_does_not_bear_is_taken_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The next larger one follows."""
    torch.manual_seed(0)
    session = Session(RunOptions(out=tmp_path / "run"))
    assert skipped_in_steps(Choosy(), "fp16", session) == [False, False, False]
    said = capfd.readouterr().err
    assert "not healed after all, with the root module in float32 the model's own code fails (autocast only)" in said
    assert [done["action"] for done in session.report.run["healed"]] == ["use-bf16"]


def test_a_fix_that_leaves_the_scaler_without_use_accuses_nobody(tmp_path: Path) -> None:
    """With autocast in bfloat16 the loss scale has nothing to do: that was our doing, and there is no scaler to delete."""
    torch.manual_seed(0)
    session = Session(RunOptions(out=tmp_path / "run"))
    sizes = (1.0,) * 10 + (3000.0,) + (1.0,) * 40
    assert not any(skipped_in_steps(Choosy(), "fp16", session, sizes))
    assert [done["action"] for done in session.report.run["healed"]] == ["use-bf16"]
    assert [incident.cause for incident in session.report.incidents] == ["fp16-overflow"]


def test_where_no_guard_can_start_nothing_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ampguard-runs").write_text("in the way")
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(8, 1)
    with pytest.raises(RunFolderError):
        ampguard.Amp(model, torch.optim.SGD(model.parameters(), 0.1), "O3", on_nonfinite="heal")
    assert model.weight.dtype == torch.float32
    assert ampguard.guarding() is None
