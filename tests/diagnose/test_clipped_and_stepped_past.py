"""Gradients that are clipped and stepped with past the scaler, both while still scaled: one breach, which names the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]


def trained(since: int) -> Callable[[], None]:
    """From iteration `since` on the script clips and steps without the scaler."""

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        opt = torch.optim.SGD(model.parameters(), lr=1e-3)
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(since + 8):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(torch.randn(16, 4))
            scaler.scale(out.float().square().mean()).backward()
            if step < since:
                scaler.step(opt)
                scaler.update()
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                opt.step()

    return body


@pytest.mark.parametrize("since", [0, 25])
def test_clipped_and_stepped_past_the_scaler(since: int, guard: Guard) -> None:
    run = guard(trained(since))

    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step, incident.occurrences) == ("bypassed-scaler", since, 8)
    assert incident.location.code == "opt.step()"
    assert "They were clipped while still scaled" in incident.explanation
    assert "scaler.unscale_(opt) in front of" in incident.fixes[0].how
    assert "scaler.step(opt); scaler.update()" in incident.fixes[0].how
