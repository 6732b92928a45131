"""`ampguard compare` on a real script: as a shell sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"

Compare = Callable[..., subprocess.CompletedProcess[str]]

SCRIPT = """
import sys
assert sys.argv[1:] == ["--width", "16"], sys.argv
import random, numpy, torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 16)
        self.outer = nn.Linear(16, 1)
    def forward(self, x):
        wide = 1e3 * self.inner(x)
        return self.outer((wide * wide).relu() / 1e6)
net = Net()
opt = torch.optim.SGD(net.parameters(), 0.01)
shift = random.random() + numpy.random.rand()  # not seeded by the script
for step in range(60):
    opt.zero_grad()
    loss = (net(torch.randn(16, 8)) - shift).square().mean()
    loss.backward()
    opt.step()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def in_a_process(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ampguard", "compare", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)


def test_table_and_json_agree_with_the_runs(folder: Path, compare: Compare) -> None:
    words = ("train.py", "--precisions", "fp32,fp16", "--steps", "30", "--out", "runs", "--", "--width", "16")
    done = in_a_process(folder, *words, "--format")  # after `--`: the script's
    assert done.returncode == 1  # it refuses the word
    done = compare("--format", "json", "--out", "again", *words[:5], *words[7:])
    assert done.returncode == 0, done.stderr
    whole = json.loads(done.stdout)
    fp32, fp16 = whole["runs"]
    assert (fp32["steps"], fp16["steps"]) == (30, 30)
    assert all(loss is not None for loss in fp32["losses"])
    assert fp16["nonfinite"] > 0
    assert fp16["incidents"][0]["cause"] == "fp16-overflow"
    assert whole["verdict"]["recommended"] == "fp32"
    assert whole["verdict"]["against"]["fp16"].startswith("not finite: fp16-overflow")
    assert (folder / "again" / "fp16" / "report.json").exists()


def test_the_same_seeds(folder: Path, compare: Compare) -> None:
    losses = []
    for name in ("one", "two"):
        words = ("--precisions", "fp32", "--steps", "3", "--format", "json", "--out", name, "train.py", "--width", "16")
        losses.append(json.loads(compare(*words).stdout)["runs"][0]["losses"])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "Missing argument 'SCRIPT'"),
        (("train.py", "--precisions", "fp32,fp8"), "'fp8' is not one of fp32, fp16, bf16"),
        (("train.py", "--precisions", "fp32,fp32"), "name each precision once"),
        (("train.py", "--precisions", "fp32,O2", "--eval"), "--eval with 'O2'"),
        (("train.py", "--steps", "0"), "--steps"),
        (("nowhere.py",), "nowhere.py: no such script"),
        (("train.py", "--out", "."), "is not empty"),
    ],
)
def test_wrong_words(folder: Path, compare: Compare, words: tuple[str, ...], message: str) -> None:
    done = compare(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
