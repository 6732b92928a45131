"""Cards and the summary go to the stderr that was there when the guard began, whatever the script puts in its place."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ampguard
import warm
from ampguard import stderr

SOURCES = Path(__file__).parents[2] / "src"

TRAINING = """
import contextlib, io, os, sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def train():
    for number in range(4):
        loss = model(torch.rand(8, 4)).square().mean()
        if number == 2:
            loss = (loss - loss).log()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("its own", file=sys.stderr)
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def call(body: str, first: str = "", *options: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "train.py").write_text(first + TRAINING + body)
        env = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "ampguard", "run", "--out", "out", *options, "train.py"]
        return warm.run(command, cwd=tmp_path, env=env, timeout=240)

    return call


def test_what_the_script_captures_is_its_own(run: Run) -> None:
    captures = "with contextlib.redirect_stderr(io.StringIO()) as said:\n    train()\nprint(repr(said.getvalue()))"
    done = run(captures)
    assert (done.returncode, done.stdout) == (0, "'its own\\n'\n")
    assert "error[domain-error] step 2" in done.stderr
    assert "ampguard: 4 steps, 1 error" in done.stderr


def test_a_log_in_place_of_stderr(run: Run, tmp_path: Path) -> None:
    """Also where it is put there before torch, and with it the guard, is imported; what overrides say is no different."""
    done = run("train()", "import sys\nsys.stderr = open('log.txt', 'w')\n", "--on-nonfinite", "skip")
    assert (tmp_path / "log.txt").read_text() == "its own\n"
    assert "error[domain-error] step 2" in done.stderr
    assert "ampguard: step 2: held off" in done.stderr


def test_a_log_in_place_of_the_file(run: Run, tmp_path: Path) -> None:
    """Whoever redirects the file itself means all that is written to it."""
    done = run("log = open('log.txt', 'w')\nos.dup2(log.fileno(), 2)\ntrain()")
    assert done.stderr == ""
    assert "error[domain-error] step 2" in (tmp_path / "log.txt").read_text()


def test_no_stderr_at_all(run: Run) -> None:
    done = run("sys.stderr = None\nfile = sys.stderr\ntrain()")
    assert "error[domain-error] step 2" in done.stderr


@pytest.mark.parametrize("closing", ["sys.stderr.close()", "os.close(2)"])
def test_where_it_is_closed_what_the_script_has_put_there_is_used(run: Run, tmp_path: Path, closing: str) -> None:
    done = run(f"log = open('log.txt', 'w')\n{closing}\nsys.stderr = log\ntrain()")
    assert (done.returncode, done.stderr) == (0, "")
    assert "error[domain-error] step 2" in (tmp_path / "log.txt").read_text()


def test_watch_keeps_what_it_finds_and_gives_it_back(tmp_path: Path) -> None:
    """A notebook has put its own in place before."""
    weight = torch.zeros(3, 1, requires_grad=True)
    notebooks, captured = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stderr(notebooks),
        ampguard.watch(out=tmp_path / "run"),
        contextlib.redirect_stderr(captured),
    ):
        (weight.sum() * float("nan")).backward()
    assert captured.getvalue() == ""
    assert "ampguard: " in notebooks.getvalue()
    assert stderr.stream() is sys.stderr
