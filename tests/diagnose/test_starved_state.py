"""An optimizer of the script's own whose low-precision state falls to 0 long after its first steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ampguard.capture.protocol import own_steps

Guard = Callable[..., Any]


class LeanRMS(torch.optim.Optimizer):
    """RMSprop whose second moment is kept, and divided by, in `dtype`."""

    def __init__(self, params: Any, dtype: torch.dtype, lr: float = 1e-3, eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "dtype": dtype})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["sq"] = torch.full_like(p, 1e-3, dtype=group["dtype"])
                g = p.grad.to(group["dtype"])
                state["sq"].mul_(0.4).addcmul_(g, g, value=0.6)
                p.sub_((g / state["sq"].sqrt().add_(group["eps"])).to(p.dtype), alpha=group["lr"])


def train(dtype: torch.dtype, faint: float) -> None:
    """The first feature is hardly there any more from step 101 on."""
    torch.manual_seed(0)
    net = nn.Linear(6, 2)
    opt = LeanRMS(net.parameters(), dtype)
    for step in range(150):
        x = torch.randn(16, 6)
        x[:, 0] *= faint if step > 100 else 1.0
        opt.zero_grad()
        net(x).square().mean().backward()
        opt.step()


def test_a_second_moment_that_is_zero_is_told(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no time to look behind every step."""
    monkeypatch.setattr(own_steps, "FREE_SECONDS", 0.0)
    monkeypatch.setattr(own_steps, "SHARE", 0.0)
    run = guard(lambda: train(torch.float16, 1e-4))
    (incident,) = run.report.incidents
    assert (incident.cause, incident.severity, incident.phase) == ("optimizer-underflow", "error", "optimizer")
    assert incident.step > 101
    assert incident.location.code == "opt.step()"
    assert (incident.evidence["state"], incident.evidence["state_dtype"]) == ("sq", "float16")
    assert incident.evidence["bad_elements"] == 2


@pytest.mark.parametrize(("dtype", "faint"), [(torch.float32, 1e-4), (torch.float16, 1.0), (torch.bfloat16, 1e-4)])
def test_enough_range_is_no_incident(dtype: torch.dtype, faint: float, guard: Guard) -> None:
    assert not [i for i in guard(lambda: train(dtype, faint)).report.incidents if i.severity == "error"]
