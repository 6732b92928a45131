"""PyTorch's own optimizers divide by 0 where they are given an eps of 0 and a weight has never had a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from watching import LateFlag, seed_everything

from ampguard.capture import gradients
from ampguard.capture.judging import judge

Guard = Callable[..., Any]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
@pytest.mark.parametrize("is_slow", [False, True])
def test_an_eps_of_zero_in_float32(
    guard: Guard, kind: type[torch.optim.Optimizer], eps: float, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`is_slow`: the device answers when the gradients of the next loss have taken the place of the update's."""
    begins = 5 if is_slow else 0
    if is_slow:
        monkeypatch.setattr(judge, "FiniteFlag", LateFlag)
        monkeypatch.setattr(gradients, "all_finite_on_cpu", lambda tensors: True)

    def loop() -> None:
        seed_everything()
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        offset = nn.Parameter(torch.ones(1))
        optimizer = kind([*net.parameters(), offset], lr=1e-3, eps=eps)  # type: ignore[call-arg]
        with torch.no_grad():
            net[0].bias[3] = -100.0  # a dead unit: its gradients are exactly 0
        for step in range(begins + 4):
            net.requires_grad_(step >= begins)
            loss = (net(torch.rand(16, 8)) + offset).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(loop)
    errors = [i for i in run.report.incidents if i.severity == "error"]
    if eps:
        assert not errors, run.stderr
        return
    (incident,) = errors
    assert (incident.cause, incident.step, incident.phase, incident.module) == (
        "optimizer-underflow",
        begins,
        "optimizer",
        "0",
    )
    assert "eps is 0" in incident.explanation
    assert [fix.action for fix in incident.fixes if fix.verified] == ["add-epsilon"]
