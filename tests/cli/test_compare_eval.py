"""`ampguard compare --eval`: the same weights and inputs in every precision, and a script that does not notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import warm

SOURCES = Path(__file__).parents[2] / "src"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}

Compare = Callable[..., subprocess.CompletedProcess[str]]

SCRIPT = """
import random, sys, torch
from torch import nn


class Wide(nn.Module):
    '''Its product fits float16 in training, and in evaluation only where images are dim.'''

    def forward(self, x):
        return (40 * x) @ (40 * x).transpose(-2, -1) / 25600


class Cache:
    def __init__(self):
        self.seen = []


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh())
        self.wide, self.head = Wide(), nn.Linear(16, 2)
        self.calls = 0

    def forward(self, x, bright=1.0, cache=None):
        self.calls += 1
        if cache is not None:
            cache.seen.append(x.sum().item())
        hidden = nn.functional.dropout(self.inner(x), 0.1)  # drawn in evaluation too
        return self.head(self.wide(hidden * bright) @ hidden)


torch.manual_seed(0)
net, cache = Net(), Cache()
opt = torch.optim.SGD(net.parameters(), 1e-2)
for step in range(30):
    net.train()
    opt.zero_grad()
    net(torch.randn(16, 8)).square().mean().backward()
    opt.step()
    if step % 10 == 9:
        net.eval()
        with torch.no_grad():
            outputs = [net(torch.randn(16, 8), bright=3.0 if step == 29 else 1.0, cache=cache) for _ in range(6)]
        print(step, sum(o.double().sum().item() for o in outputs), net.calls, len(cache.seen))
print([p.double().sum().item() for p in net.parameters()], random.random() if "rand" in sys.argv else "")
print(net.inner[1].running_mean.sum().item(), torch.rand(()).item())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.slow
def test_modules_are_compared_and_the_script_does_not_notice(folder: Path, compare: Compare) -> None:
    done = compare("train.py", "--eval", "--out", "runs", "--format", "json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["could_not"] == []
    assert found["calls"] == 12  # four of each evaluation's six
    modules = found["modules"]
    assert [modules[0][key] for key in ("module", "kind", "precision", "step")] == ["wide", "Wide", "fp16", 30]
    by_name = {(d["module"], d["precision"]): d for d in modules}
    assert by_name["wide", "fp16"]["lost"] > 0.01
    assert by_name["inner.0", "fp16"]["lost"] == 0.0
    assert 0.0 < by_name["inner.0", "fp16"]["error"] < by_name["inner.0", "bf16"]["error"] < 0.02
    assert by_name["inner.0", "bf16"]["input_error"] == 0.0
    assert all(d["lost"] == 0.0 for d in modules if d["precision"] == "bf16")

    words = ("run", "--precision", "fp32", "--seed", "0", "--out", "alone", "train.py")
    alone = warm.run([sys.executable, "-m", "ampguard", *words], cwd=folder, env=ENVIRONMENT)
    printed = (folder / "runs" / "fp32-output.txt").read_text()
    assert all(line in printed.splitlines() for line in alone.stdout.splitlines())


def test_as_a_table(folder: Path, compare: Compare) -> None:
    done = compare("--eval", "--precisions", "fp16", "--out", "runs", "train.py")
    assert done.returncode == 0, done.stderr
    head, first, *rest = done.stdout.splitlines()
    assert head.split()[:4] == ["module", "class", "precision", "error"]
    assert "fp16" in first
    assert "  fp16: no element of the outputs of Net is finite any more" in rest
    assert "12 evaluation calls, each with the same weights and inputs in every precision" in rest


def test_nothing_evaluated(folder: Path, compare: Compare) -> None:
    done = compare("--eval", "--steps", "5", "--out", "runs", "train.py")
    assert done.returncode == 1
    assert "nothing was compared: the script called no model under no_grad" in done.stdout


def test_nothing_finite(folder: Path, compare: Compare) -> None:
    lines = [
        "import torch",
        "net = torch.nn.Linear(8, 2)",
        "net.weight.data.fill_(float('nan'))",
        "net.requires_grad_(False)",
    ]
    (folder / "train.py").write_text("\n".join([*lines, "torch.no_grad()(net)(torch.randn(4, 8))"]))
    done = compare("--eval", "--precisions", "fp16", "--out", "runs", "train.py")
    assert done.returncode == 1
    assert "nothing was compared: in float32 itself no output of the evaluation is finite" in done.stdout


MIXING = """
import torch
from torch import nn


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        return torch.zeros(4, 8).index_add_(0, torch.arange(4), self.lin(x))


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 8), Mixing(), nn.Linear(8, 2))
with torch.no_grad():
    net(torch.randn(4, 8))
"""


def test_a_module_that_bears_no_autocast_is_left_in_float32(folder: Path, compare: Compare) -> None:
    (folder / "train.py").write_text(MIXING)
    done = compare("--eval", "--out", "runs", "--format", "json", "train.py")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert len(found["could_not"]) == 1
    assert found["could_not"][0].startswith("1 stays in float32: its own code does not go with")
    assert all(0.0 < d["error"] < 0.02 for d in found["modules"] if d["module"] in ("0", ""))


def test_nothing_to_compare_with(folder: Path, compare: Compare) -> None:
    done = compare("--eval", "--precisions", "fp32", "train.py")
    assert done.returncode == 2
    assert "name another precision" in done.stderr
