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
    path.write_text(text)
    ran = guard(lambda: exec(compile(text, str(path), "exec"), {"__name__": "script"}))
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
