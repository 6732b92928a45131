"""The installed command with its real session on real training scripts: how it looks from a shell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import warm
from ampguard.report.store import read_report

SOURCES = Path(__file__).parents[2] / "src"
GUARD = ("-m", "ampguard", "run")

TRAINING = """
import signal, sys, torch
torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 1)
    def forward(self, x, broken):
        if broken and "raise" in sys.argv:
            raise RuntimeError("out of luck")
        return self.inner(x)
model = Net()
opt = torch.optim.SGD(model.parameters(), 0.1)
for step in range(6):
    opt.zero_grad()
    loss = model(torch.rand(8, 4), broken=step == 3).square().mean()
    if step == 3 and "nan" in sys.argv:
        loss = (loss - loss).log()
    loss.backward()
    opt.step()
    print(step, flush=True)
    if step == 3 and "exit" in sys.argv:
        sys.exit("the loss is not finite")
    if step == 3 and "term" in sys.argv:
        signal.raise_signal(signal.SIGTERM)
"""

Python = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def python(tmp_path: Path) -> Python:
    (tmp_path / "train.py").write_text(TRAINING)

    def call(*words: str, is_real: bool = False) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *words]
        if is_real:
            return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
        return warm.run(command, cwd=tmp_path, env=env, timeout=240)

    return call


def test_a_failure_is_explained_and_the_scripts_end_is_its_own(python: Python, tmp_path: Path) -> None:
    done = python(*GUARD, "--out", "out", "train.py", "nan", "exit", is_real=True)
    assert done.returncode == 1
    assert done.stdout == "0\n1\n2\n3\n"
    card, own_words, summary = done.stderr.partition("the loss is not finite\n")
    assert own_words
    assert "error[domain-error] step 3, loss" in card
    assert "train.py:18" in card
    assert "ampguard: 4 steps, 1 error" in summary
    assert "report: out/report.json" in summary
    assert read_report(tmp_path / "out").incidents[0].cause == "domain-error"


def test_a_traceback_through_modules_is_pythons_own(python: Python) -> None:
    plain = python("train.py", "raise")
    done = python(*GUARD, "train.py", "raise")
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout) == (1, "0\n1\n2\n")
    assert done.stderr.startswith(plain.stderr)
    assert "ampguard: 3 steps, no incident" in done.stderr[len(plain.stderr) :]


def test_sigterm_and_steps(python: Python, tmp_path: Path) -> None:
    done = python(*GUARD, "--out", "killed", "train.py", "term")
    assert done.returncode == -signal.SIGTERM
    assert read_report(tmp_path / "killed").steps == 4
    done = python(*GUARD, "--out", "short", "--steps", "2", "train.py")
    assert (done.returncode, done.stdout) == (0, "0\n1\n")
    assert read_report(tmp_path / "short").steps == 2


ENDINGS = {
    "exits past Python": "os._exit(7)",
    "aborts": "os.abort()",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "quits": "os.kill(os.getpid(), signal.SIGQUIT)",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_that_ends_without_a_word_has_written_its_error(python: Python, tmp_path: Path, ending: str) -> None:
    (tmp_path / "lost.py").write_text(
        f"{TRAINING}\nimport os\nimport resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n{ENDINGS[ending]}\n"
    )
    plain = python("lost.py", "nan")
    done = python(*GUARD, "--out", "out", "lost.py", "nan")
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout)
    assert done.returncode != 0
    (incident,) = read_report(tmp_path / "out").incidents
    assert (incident.step, incident.cause) == (3, "domain-error")
    assert [file.name for file in (tmp_path / "out").iterdir() if file.name.startswith(".report")] == []


@pytest.mark.slow
def test_two_ranks_leave_one_report(python: Python, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--monitor-interval=0.05")
    done = python(*launcher, *GUARD, "--out", "both", "train.py", "nan", is_real=True)
    assert done.returncode == 0, done.stderr
    report = read_report(tmp_path / "both")
    assert report.environment.world_size == 2
    first = report.incidents[0]
    assert (first.step, first.cause, first.evidence["ranks"]) == (3, "domain-error", [0, 1])
