"""Weights and inputs of low precision: what a verified fix says is written into the script, and the script is run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Guard = Callable[..., Any]

HEAD = "import torch\nfrom torch import nn\ntorch.manual_seed(0)\n"

CHOSEN_TYPE = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc, self.out = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        h = self.fc(self.norm(x.float()).type(x.dtype))
        return self.out(h * h)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.dtype = torch.float16
        self.blocks = nn.ModuleList([Block(), Block()])
    def forward(self, x):
        h = x.type(self.dtype)
        for block in self.blocks:
            h = block(h)
        return h.type(x.dtype)
net = Net()
for part in net.modules():
    if isinstance(part, nn.Linear):
        part.half()
# HERE
optimizer = torch.optim.SGD(net.parameters(), 1e-4)
for step in range(3):
    x = torch.randn(2, 8)
    if step == 2:
        net.blocks[1].fc.weight.data.mul_(1000)
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

PART = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).half()
        self.head = nn.Linear(8, 4)
    def forward(self, x):
        h = self.encoder(x.half())
        n = h * h / 100
        return self.head(n.float())
net = Net()
# HERE
optimizer = torch.optim.SGD(net.parameters(), 1e-9)
for step in range(3):
    loss = net(torch.randn(2, 8) * (9000 if step == 2 else 1)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

GIVEN_TO_A_LOSS = """
class Criterion(nn.Module):
    def forward(self, model, x):
        return (model(x) * model(x)).float().mean()
def narrow(x):
    return x.half() if x.dtype is torch.float32 else x
net, criterion = nn.Linear(8, 4).half(), Criterion()
# HERE
for step in range(3):
    x = torch.randn(2, 8) * (9000 if step == 2 else 1)
    loss = criterion(net, narrow(x))
    loss.backward()
    net.zero_grad()
"""

UNDER_AUTOCAST = """
class Middle(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
    def forward(self, h):
        h = self.fc(h)
        return (h * h).sum(-1, keepdim=True) / 1000 + h
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), Middle().half(), nn.Linear(8, 4)
    def forward(self, x):
        h = self.first(x)
        h = self.middle(h)
        return self.last(h)
net = Net()
# HERE
for step in range(3):
    x = torch.randn(2, 8) * (2000 if step == 2 else 1)
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
    loss = out.float().mean()
    loss.backward()
    net.zero_grad()
"""

CHOSEN_UNDER_AUTOCAST = """
class Trainer:
    def __init__(self):
        self.data_type, self.model = torch.float16, nn.Linear(8, 4)
    def loss(self, x, y):
        x = x.to(self.data_type)
        y = y.to(self.data_type)
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.model(x)
            return (out.exp() - y).abs().mean()
trainer = Trainer()
with torch.no_grad():
    trainer.model.bias.fill_(2)
# HERE
for step in range(3):
    loss = trainer.loss(torch.full((2, 8), 1.0) * (30 if step == 2 else 1), torch.rand(2, 4))
    loss.backward()
    trainer.model.zero_grad()
"""

PASTED = {
    "a type that was chosen": (
        CHOSEN_TYPE,
        "for p in net.parameters(): p.data = p.data.bfloat16() if p.dtype == torch.float16 else p.data",
        "net.float()",
        ["h = x.type(self.dtype)"],
        [("self.dtype)", "{})")],
    ),
    "a part of a model": (
        PART,
        "net.encoder.to(torch.bfloat16)",
        "net.float()",
        ["h = self.encoder(x.half())"],
        [("x.half()", "x.to({})")],
    ),
    "a model that a loss is given": (
        GIVEN_TO_A_LOSS,
        "net.to(torch.bfloat16)",
        "net.float()",
        ["return x.half() if x.dtype is torch.float32 else x"],
        [("x.half()", "x.to({})")],
    ),
    "weights of a part under autocast": (
        UNDER_AUTOCAST,
        'torch.autocast("cpu", dtype=torch.bfloat16), and net.middle.to(torch.bfloat16)',
        'torch.autocast("cpu", enabled=False), and net.float()',
        [],
        [("dtype=torch.float16", "dtype={}")],
    ),
    "casts of a trainer's under autocast": (
        CHOSEN_UNDER_AUTOCAST,
        'torch.autocast("cpu", dtype=torch.bfloat16)',
        'torch.autocast("cpu", enabled=False)',
        ["x = x.to(self.data_type)", "y = y.to(self.data_type)"],
        [("to(self.data_type)", "to({})"), ("dtype=torch.float16)", "dtype={})")],
    ),
}


def run_guarded(text: str, path: Path, guard: Guard) -> Any:
    path.write_text(text)
    code = compile(text, str(path), "exec")
    watched = guard(lambda: exec(code, {"__name__": "pasted"}))
    assert watched.faults == 0, watched.stderr
    return watched


def ends_finite(text: str) -> bool:
    """Whether the script runs to its end, and its last loss is a number."""
    names: dict[str, Any] = {"__name__": "pasted"}
    exec(compile(text, "<pasted>", "exec"), names)
    return bool(torch.isfinite(names["loss"]))


@pytest.mark.parametrize("case", PASTED)
def test_what_is_said_works_when_it_is_written(case: str, guard: Guard, tmp_path: Path) -> None:
    script, bf16, fp32, casts, changes = PASTED[case]
    first = run_guarded(HEAD + script, tmp_path / "script.py", guard).first
    assert (first.cause, first.step) == ("fp16-overflow", 2)
    by_action = {fix.action: fix for fix in first.fixes}
    for action, change, dtype in (("use-bf16", bf16, "torch.bfloat16"), ("disable-amp", fp32, "torch.float32")):
        fix = by_action[action]
        assert fix.verified
        said, _, in_casts = fix.how.replace(", and " + dtype[6:], "\nand " + dtype[6:]).partition("\nand ")
        assert said.partition(": ")[2] == change
        assert all(cast in in_casts for cast in casts), in_casts
        assert bool(casts) is bool(in_casts)
        pasted = script
        for old, new in changes:
            pasted = pasted.replace(old, new.format(dtype))
        if "autocast" in change and dtype == "torch.float32":
            pasted = pasted.replace(
                'torch.autocast("cpu", dtype=torch.float32)', 'torch.autocast("cpu", enabled=False)'
            )
        line = change.rpartition(", and ")[2] if "net" in change else ""
        assert ends_finite(HEAD + pasted.replace("# HERE", line))
    assert not ends_finite(HEAD + script)


def test_a_region_whose_weights_are_half_gets_them_in_float32(guard: Guard, tmp_path: Path) -> None:
    first = run_guarded(HEAD + UNDER_AUTOCAST, tmp_path / "script.py", guard).first
    how = next(fix.how for fix in first.fixes if fix.action == "force-fp32")
    assert how.endswith("\nand make float32 of its weights as well: net.middle.float()")
    assert "self.middle(h.float())" in how
    pasted = UNDER_AUTOCAST.replace("# HERE", "net.middle.float()")
    for name in ("middle", "last"):
        written = f'with torch.autocast("cpu", enabled=False): X self.{name}(h.float())'
        for start in ("h =", "return"):
            pasted = pasted.replace(f"{start} self.{name}(h)", written.replace("X", start))
    assert ends_finite(HEAD + pasted)
