"""What PyTorch refuses and a script catches is told once, also where the script goes on to step with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Guard = Callable[..., Any]


def test_each_micro_batch_is_unscaled_and_the_refusal_caught(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        opt = torch.optim.SGD(model.parameters(), lr=1e-4)
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=64.0)
        for _ in range(4):
            for _ in range(3):
                with torch.autocast("cpu", dtype=torch.float16):
                    out = model(torch.randn(8, 4))
                scaler.scale(out.float().square().mean() / 3).backward()
                with contextlib.suppress(RuntimeError):
                    scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()

    run = guard(body)

    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step) == ("accumulation-broken", 0)
    assert incident.location.code == "scaler.unscale_(opt)"


def test_a_schedule_that_moves_in_a_hook_of_its_optimizer_never_runs_ahead(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        opt = torch.optim.SGD(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(opt, total_iters=20)
        opt.register_step_post_hook(lambda *_: schedule.step())
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=2.0**24)
        for _ in range(16):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(torch.randn(8, 4))
            scaler.scale(out.float().square().mean()).backward()
            scaler.step(opt)
            scaler.update()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert "scheduler-on-skipped-step" not in [i.cause for i in run.report.incidents]
