"""The printed line, put in place of the script's, cures the script: nothing is left to the reader."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from watching import Watched

from ampguard.incident import Fix

Guard = Callable[..., Watched]

HEAD = """\
import math
import torch
from torch import nn
torch.manual_seed(0)
class Config:
    low = -1e9
net = nn.Linear(4, 4)
x = torch.randn(6, 4)
keep = torch.ones(6, 4)
keep[2] = 0
"""

FLOAT32 = {
    "a root behind where": """\
h = net(x)
root = torch.sqrt(h * 2 - 1)
loss = torch.where(h > 1, root, h).mean()
""",
    "a root of a call behind where": """\
h = net(x)
bits = torch.sqrt(h.cos() - 0.5)
loss = torch.where(h.cos() > 0.6, bits, h).mean()
""",
    "a quotient by a root behind nan_to_num": """\
h = net(x) * keep
unit = h / h.square().sum(1, keepdim=True).sqrt()
loss = unit.nan_to_num().mean()
""",
    "an entropy of forbidden actions": """\
h = net(x)
h = h.masked_fill(torch.eye(6, 4).bool(), -math.inf).log_softmax(1)
loss = (h.exp() * h).sum(1).mean()
""",
    "an infinity written as a string": """\
h = net(x)
h = torch.where(torch.eye(6, 4).bool(), float("-inf"), h).log_softmax(1)
loss = (h.exp() * h).sum(1).mean()
""",
}
FLOAT16 = {
    "a constant with a name": "mask = (1 - keep.half()) * Config.low",
    "a constant that is written": "mask = (1.0 - keep.half()) * -1e9",
    "a constant of another type": "mask = (1 - keep.half()) * torch.finfo(torch.float32).min",
    "a constant to be negated": "mask = -((1 - keep.half()) * 1e9)",
    "a constant to be subtracted": "mask = 0\nscores = scores - (1 - keep.half()) * 1e9",
}
"""A row that is masked everywhere: its scores are -Inf, and its softmax is NaN."""


def code_of(fix: Fix) -> str:
    """The changed line without the words before it and the place behind it."""
    return re.sub(r"  # \S+:\d+$", "", fix.how.rpartition(": ")[2])


def loss_and_gradients(text: str) -> list[Tensor]:
    """The truth, by PyTorch alone."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "<cured>", "exec"), names)
    return [names["loss"].detach(), *(p.grad for p in names["net"].parameters())]


def check_that_it_cures(text: str, file: Path, guard: Guard) -> None:
    file.write_text(text)
    linecache.checkcache()
    first = guard(lambda: exec(compile(text, str(file), "exec"), {"__name__": "__main__"})).first
    fix = first.fixes[0]
    assert fix.verified, first
    place = re.search(r"  # \S+:(\d+)$", fix.how)
    number = int(place[1]) if place else first.location.line
    lines = text.splitlines()
    assert lines[number - 1] != code_of(fix)
    lines[number - 1] = code_of(fix)
    assert not all(bool(t.isfinite().all()) for t in loss_and_gradients(text))
    assert all(bool(t.isfinite().all()) for t in loss_and_gradients("\n".join(lines))), fix


@pytest.mark.parametrize("name", FLOAT32)
def test_in_any_precision(name: str, tmp_path: Path, guard: Guard) -> None:
    check_that_it_cures(HEAD + FLOAT32[name] + "loss.backward()\n", tmp_path / "user.py", guard)


@pytest.mark.parametrize("name", FLOAT16)
def test_masks_in_float16(name: str, tmp_path: Path, guard: Guard) -> None:
    step = f"scores = net(x).half()\n{FLOAT16[name]}\nloss = (scores + mask).softmax(1).square().mean().float()\n"
    check_that_it_cures(HEAD + step + "loss.backward()\n", tmp_path / "user.py", guard)


def test_name_that_the_script_has_is_not_taken(tmp_path: Path, guard: Guard) -> None:
    text = HEAD + FLOAT32["a root of a call behind where"].replace("h = net(x)", "safe = 1\nh = net(x) * safe")
    file = tmp_path / "user.py"
    file.write_text(text + "loss.backward()\n")
    linecache.checkcache()
    first = guard(lambda: exec(compile(file.read_text(), str(file), "exec"), {"__name__": "__main__"})).first
    assert "(operand := h.cos() - 0.5) > 0, operand, 1.0" in first.fixes[0].how


def test_card_does_not_break_code(tmp_path: Path, guard: Guard) -> None:
    from ampguard.report.terminal import incident_card

    text = (
        HEAD + "h = net(x)\nloss = torch.where(h > 1, torch.sqrt(h * 2 - 1 + 0 * h.detach().sum(1, True)), h).mean()\n"
    )
    file = tmp_path / "user.py"
    file.write_text(text + "loss.backward()\n")
    linecache.checkcache()
    first = guard(lambda: exec(compile(file.read_text(), str(file), "exec"), {"__name__": "__main__"})).first
    card = "\n".join(line.plain for line in incident_card(first).lines(60))
    codes = [fix.how.rpartition(": ")[2] for fix in first.fixes if fix.verified]
    assert len(codes) == 2
    assert all(code in card for code in codes)
    assert "hidden" not in card
