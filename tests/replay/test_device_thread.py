"""Backward passes in a thread that Python did not start, as the autograd engine has one for each accelerator.

On the CPU the engine has none, but it continues in a thread of its own where backward passes are nested 60 deep.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

import ampguard
import warm
from ampguard.capture.judging import outputs
from ampguard.report.store import read_report

IN_ANOTHER_THREAD = """
import os, sys, threading
import torch
from torch import nn

run_backward = torch.autograd._engine_run_backward
depths = []


class Nest(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, depth, run):
        ctx.depth, ctx.run = depth, run
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        nested(ctx.depth - 1, ctx.run) if ctx.depth else ctx.run()
        return gradient, None, None


def nested(depth, run):
    with torch.enable_grad():
        y = Nest.apply(torch.ones((), requires_grad=True), depth, run)
    run_backward((y,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def elsewhere(*args, **kwargs):
    returned = []
    nested(60, lambda: returned.append(run_backward(*args, **kwargs)))
    return returned[0]


torch.autograd._engine_run_backward = elsewhere


def note_depth(gradient):
    frame, depth = sys._getframe(), 0
    while frame is not None:
        frame, depth = frame.f_back, depth + 1
    depths.append((depth, threading.current_thread() is threading.main_thread()))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(6):
    a = torch.randn(5, 4)
    b = a.clone() if step == 3 else a + torch.randn(5, 4)
    optimizer.zero_grad()
    out = model(a) - model(b)
    out.register_hook(note_depth)
    loss = out.pow(2).sum(1).sqrt().mean()
    loss.backward()
    if torch.isfinite(model[0].weight.grad).all():
        optimizer.step()
assert not any(is_main for _, is_main in depths) and (1, False) in depths, depths
print("trained", flush=True)
"""


def test_a_backward_pass_in_a_devices_thread_is_run_again(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    # (the threads of the engine and the end of the interpreter do not agree)
    script.write_text(
        f"import os, ampguard\nwith ampguard.watch(out={str(tmp_path / 'run')!r}):\n"
        + "".join(f"    {line}\n" if line else "\n" for line in IN_ANOTHER_THREAD.splitlines())
        + "os._exit(0)\n"
    )
    done = warm.run([sys.executable, str(script)], cwd=tmp_path, env=os.environ, timeout=120)
    assert "trained" in done.stdout, done.stderr
    report = read_report(tmp_path / "run" / "report.json")
    (incident,) = report.incidents
    assert (incident.cause, incident.step, incident.op) == ("singular-gradient", 3, "aten.div.Tensor")
    assert incident.evidence["rung"] == "replay"
    assert incident.location is not None
    assert incident.location.code == "loss = out.pow(2).sum(1).sqrt().mean()"
    assert any(fix.verified for fix in incident.fixes)


class Answering(outputs.FiniteFlag):
    """A device comes to its flag between two questions."""

    asked = 0

    @property
    def is_known(self) -> bool:
        type(self).asked += 1
        return type(self).asked % 2 == 0


def test_what_a_device_answers_while_it_is_asked_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "FiniteFlag", Answering)
    monkeypatch.setattr(outputs, "is_immediate", lambda _: False)
    model = torch.nn.Linear(3, 2)
    with ampguard.watch(out=tmp_path / "run") as session, torch.no_grad():
        for _ in range(6):
            model(torch.ones(4, 3))
    assert not session._barrier.tripped
    assert not session.report.incidents
