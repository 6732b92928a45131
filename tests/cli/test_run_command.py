"""`ampguard run`: which words are ours and which are the script's, and how wrong ones are answered."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"
FAKE = Path(__file__).with_name("with_fake_session.py")

Ampguard = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def ampguard(tmp_path: Path) -> Ampguard:
    (tmp_path / "train.py").write_text("import sys, torch\nprint(sys.argv[1:], __name__)\nsys.exit(len(sys.argv))")
    (tmp_path / "torch.py").write_text("")  # the session starts with `import torch`; an empty one will do

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": str(SOURCES)}
        command = [sys.executable, str(FAKE), *words]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)

    return call


DEFAULTS = (
    "out=None, steps=None, max_incidents=5, on_nonfinite='observe', script_name='train', seed=None, overrides=None"
)


@pytest.mark.parametrize(
    "rest",
    [
        (),
        ("--lr", "0.1", "--steps", "9", "-m", "x"),
        ("--out", "mine", "--help", "--version"),
        ("--", "-x", "--"),
        ("", "a b", "-"),
    ],
)
@pytest.mark.parametrize("start", [("train.py",), ("-m", "train"), ("-mtrain",), ("--", "train.py")])
def test_words_after_the_script_are_the_scripts(
    ampguard: Ampguard, start: tuple[str, ...], rest: tuple[str, ...]
) -> None:
    done = ampguard("run", *start, *rest)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        f"session RunOptions({DEFAULTS})",
        f"{list(rest)} __main__",
        f"finish SystemExit({len(rest) + 1})",
    ]
    assert done.returncode == len(rest) + 1


@pytest.mark.parametrize("script", [("train.py",), ("-m", "train")])
def test_words_before_the_script_are_ours(ampguard: Ampguard, script: tuple[str, ...]) -> None:
    options = ("--steps", "7", "--out", "folder", "--max-incidents=2", "--on-nonfinite", "stop")
    done = ampguard("run", *options, *script, "--steps", "9")
    assert "steps=7, max_incidents=2, on_nonfinite='stop', script_name='train'" in done.stdout
    assert "PosixPath('folder')" in done.stdout
    assert "['--steps', '9'] __main__" in done.stdout


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        (("--precision", "bf16"), "'bf16'"),
        (("--amp-opt-level", "O1"), "'fp16'"),
        (("--amp-opt-level", "O2"), "'O2'"),
        (("--precision", "bf16-true"), "'bf16-true'"),
        (("--precision", "16-mixed"), "'fp16'"),
        (("--precision", "BFloat16"), "'bf16'"),
        (("--precision", "o2"), "'O2'"),
        (("--amp-opt-level", "o1"), "'fp16'"),
        (("--disable-amp",), "'fp32'"),
        (("--force-fp32", "a.*"), "None"),
    ],
)
def test_overrides(ampguard: Ampguard, options: tuple[str, ...], precision: str) -> None:
    done = ampguard("run", *options, "--force-fp32", "head", "train.py", "--precision", "fp16")
    patterns = "('a.*', 'head')" if "a.*" in options else "('head',)"
    assert f"overrides=Overrides(precision={precision}, force_fp32={patterns}, " in done.stdout
    assert "['--precision', 'fp16'] __main__" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run",), "Missing argument 'SCRIPT'"),
        (("run", "--lr", "1", "train.py"), "No such option"),
        (("run", "--steps"), "requires an argument"),
        (("run", "--steps", "0", "train.py"), "--steps"),
        (("run", "--steps", "many", "train.py"), "--steps"),
        (("run", "--seed", str(2**64), "train.py"), "-9223372036854775808<=x<=18446744073709551615"),
        (("run", "--seed", str(-(2**63) - 1), "train.py"), "-9223372036854775808<=x<=18446744073709551615"),
        (("compare", "--seed", str(2**64), "train.py"), "-9223372036854775808<=x<=18446744073709551615"),
        (("run", "--on-nonfinite", "panic", "train.py"), "observe"),
        (("run", "-m"), "requires an argument"),
        (("run", "--precision", "fp8", "train.py"), "fp32"),
        (("run", "--precision", "fp16", "--disable-amp", "train.py"), "contradict each other"),
        (("run", "--amp-opt-level", "O4", "train.py"), "O0"),
        (("run", "--force-fp32", "", "train.py"), "an empty pattern"),
        (("rum", "train.py"), "No such command"),
        (("--fast", "run", "train.py"), "No such option"),
        (("run", "--out", "full", "train.py"), "--out full: is not empty"),
        (("run", "--out", "train.py", "train.py"), "--out train.py: there is a file of that name"),
        (("explain", "fp16_overflw"), "did you mean fp16-overflow"),
    ],
)
def test_wrong_words(ampguard: Ampguard, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    done = ampguard(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("words", [("run", "nowhere.py"), ("run", "-m", "nowhere")])
def test_nothing_to_run_is_pythons_own_message(ampguard: Ampguard, tmp_path: Path, words: tuple[str, ...]) -> None:
    python = subprocess.run([sys.executable, *words[1:]], cwd=tmp_path, capture_output=True, text=True)
    done = ampguard(*words)
    assert (done.returncode, done.stdout, done.stderr) == (python.returncode, "", python.stderr)


def test_ctrl_c_is_the_scripts_not_clicks(ampguard: Ampguard, tmp_path: Path) -> None:
    (tmp_path / "stopped.py").write_text("raise KeyboardInterrupt")
    done = ampguard("run", "stopped.py")
    assert done.returncode == -2
    assert "Aborted" not in done.stderr
    assert "cli" not in done.stderr


@pytest.mark.parametrize("raised", ["EOFError", "__import__('click').Abort()", "__import__('click').UsageError('x')"])
def test_the_scripts_exceptions_are_not_clicks(ampguard: Ampguard, tmp_path: Path, raised: str) -> None:
    (tmp_path / "broken.py").write_text(f"raise {raised}")
    python = subprocess.run([sys.executable, "broken.py"], cwd=tmp_path, capture_output=True, text=True)
    done = ampguard("run", "broken.py")
    assert (done.returncode, done.stderr) == (1, python.stderr)
