"""`ampguard compare` in this process, with the runs that it starts forked."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

import warm
from ampguard.cli import main
from ampguard.compare import evaluation, runs

SOURCES = Path(__file__).parents[2] / "src"


@pytest.fixture
def compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`compare(*words)`: what a shell in `tmp_path` sees of `ampguard compare *words`."""
    processes = SimpleNamespace(run=_forked, STDOUT=subprocess.STDOUT)
    for module in (runs, evaluation):
        monkeypatch.setattr(module, "subprocess", processes)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(SOURCES))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        status = main(["compare", *words])
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(words, status, out, err)

    return run


def _forked(
    command: list[str], env: Mapping[str, str], stdout: IO[Any], stderr: int, check: bool
) -> subprocess.CompletedProcess[Any]:
    return subprocess.CompletedProcess(command, warm.start(command, env=env, stdout=stdout, stderr=stdout).wait(240.0))
