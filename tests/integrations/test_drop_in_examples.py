"""The examples run, with other options too."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def ran(name: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", [name, *words.split()])
    monkeypatch.syspath_prepend(EXAMPLES)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("words", ["", "--amp-opt-level O2", "--disable_amp"])
def test_mae(words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = ran("mae_native_scaler.py", f"--epochs 1 --steps 4 {words}", monkeypatch, capsys)
    assert "loss scale " + ("1\n" if "disable" in words else "65536\n") in out


def test_flat_buffers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = ran("amp_trainer_digits.py", "--iterations 70", monkeypatch, capsys)
    assert float(out.split("accuracy ")[1].split("%")[0]) > 80
    with pytest.raises(FloatingPointError, match="iteration=2!"):
        ran("amp_trainer_digits.py", "--bad 2", monkeypatch, capsys)
