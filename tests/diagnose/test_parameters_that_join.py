"""Parameters that are added to an optimizer in the middle of a run, by a trainer that clears only those of its beginning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]


@pytest.mark.parametrize("made_late", [True, False])
@pytest.mark.parametrize("clears_all", [True, False])
def test_a_group_that_is_never_cleared(made_late: bool, clears_all: bool, guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.ModuleDict({"first": nn.Linear(6, 1)})
        second = nn.Linear(6, 1)
        net.forward = lambda x: sum(layer(x) for layer in net.values())
        cleared = list(net.parameters())
        opt = torch.optim.SGD(cleared, lr=0.01)
        for it in range(24):
            if it == 11:
                net["second"] = nn.Linear(6, 1) if made_late else second
                opt.add_param_group({"params": list(net["second"].parameters())})
            loss = (net(torch.randn(16, 6)) - 1).pow(2).mean()
            for p in net.parameters() if clears_all else cleared:
                p.grad = None
            loss.backward()
            opt.step()

    incidents = guard(body).report.incidents
    if clears_all:
        assert not incidents
    else:
        (incident,) = incidents
        assert (incident.cause, incident.step, incident.location.code) == ("missing-zero-grad", 12, "opt.step()")
