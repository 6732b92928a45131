"""What a fix says is written in the names of the file that it goes into."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Guard = Callable[..., Any]

ATTENTION = """
import torch as th
from torch import nn
th.manual_seed(0)
class Attention(nn.Module):
    def forward(self, x):
        return (x @ x.transpose(1, 2)).softmax(-1) @ x
net = nn.Sequential(nn.Linear(4, 4), Attention(), nn.Linear(4, 4))
# HERE
optimizer = th.optim.SGD(net.parameters(), lr=1e-3)
for step in range(3):
    with th.autocast("cpu", dtype=th.float16):
        loss = net(th.randn(2, 3, 4) * (800 if step == 2 else 1)).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

RATE = """
import torch as th
th.manual_seed(0)
net = th.nn.Linear(4, 1)
optimizer = th.optim.SGD(net.parameters(), lr=30.0)
for step in range(40):
    loss = (net(th.randn(8, 4)) - 1).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def run(text: str, path: Path, guard: Guard) -> Any:
    return run_in({"__name__": "script"}, text, path, guard)


def run_in(names: dict[str, Any], text: str, path: Path, guard: Guard) -> Any:
    path.write_text(text)
    ran = guard(lambda: exec(compile(text, str(path), "exec"), names))
    assert ran.faults == 0, ran.stderr
    return ran


def test_code_beside_the_model(guard: Guard, tmp_path: Path) -> None:
    first = run(ATTENTION, tmp_path / "script.py", guard).first
    fix = next(fix for fix in first.fixes if fix.action == "force-fp32")
    assert fix.verified
    _, *lines = fix.how.splitlines()
    assert lines[1] == 'part.forward = th.autocast("cpu", enabled=False)(part.forward)'
    names: dict[str, Any] = {"__name__": "pasted"}
    exec(ATTENTION.replace("# HERE", "\n".join(lines)), names)
    assert torch.isfinite(names["loss"])


def test_fixes_of_a_divergence(guard: Guard, tmp_path: Path) -> None:
    first = run(RATE, tmp_path / "script.py", guard).first
    assert first.cause == "divergence"
    assert any("th.nn.utils.clip_grad_norm_(" in fix.how for fix in first.fixes)


@pytest.mark.parametrize(
    "head", ["import torch.nn, torch as th", "from setup import *\nimport torch as th\nimport torch"]
)
def test_torch_by_its_own_name_stays(head: str, guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "setup.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    first = run(RATE.replace("import torch as th", head), tmp_path / "script.py", guard).first
    assert any(" torch.nn.utils.clip_grad_norm_(" in f" {line}" for fix in first.fixes for line in fix.how.splitlines())


MODEL_FILE = """
from torch.nn import Linear, Module
from torch.nn.functional import softmax
class Decoder(Module):
    def __init__(self):
        super().__init__()
        self.project = Linear(8, 8)
    def forward(self, x, mask):
        h = self.project(x)
        scores = (h @ h.mT).masked_fill(~mask, -float("inf"))
        return (softmax(scores, -1) @ h).square().mean()
"""

LOOP = """
import torch
torch.manual_seed(0)
net = Decoder()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
for step in range(3):
    mask = torch.ones(4, 5, 5, dtype=torch.bool)
    mask[1, 2] = step != 2
    loss = net(torch.randn(4, 5, 8), mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

MEAN_OF_EXPONENTIALS = """
import torch
torch.manual_seed(0)
net = torch.nn.Linear(5, 7)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
for step in range(3):
    s = net(torch.randn(6, 5) * (400 if step == 2 else 1))
    loss = s.exp().mean(1).log().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_line_says_what_its_file_has_to_import(guard: Guard, tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(MODEL_FILE)
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(MODEL_FILE, str(file), "exec"), names)
    first = run_in(names, LOOP, tmp_path / "script.py", guard).first
    assert first.location.file == str(file)
    hows = [fix.how for fix in first.fixes if "torch." in fix.how and "masked_fill" in fix.how]
    assert hows
    assert all(how.endswith("import torch") for how in hows)
    assert not any(how.endswith("import torch") for how in (f.how for f in first.fixes) if "torch." not in how[:-12])


@pytest.mark.parametrize(("head", "tail"), [("", "  # import math"), ("import math", "")])
def test_a_line_that_needs_math(head: str, tail: str, guard: Guard, tmp_path: Path) -> None:
    first = run(head + MEAN_OF_EXPONENTIALS, tmp_path / "script.py", guard).first
    (how,) = [fix.how for fix in first.fixes if "math." in fix.how]
    assert how == f"loss = (torch.logsumexp(s, 1) - math.log(s.shape[1])).mean(){tail}"
