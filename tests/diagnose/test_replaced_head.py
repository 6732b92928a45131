"""A layer that is replaced after some training, with the optimizer kept."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ampguard import compat
from ampguard.capture.protocol.scans import left_at

Guard = Callable[..., Any]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_head_of_another_size_in_the_middle_of_a_run(frozen: bool, guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.ModuleDict({"body": nn.Linear(6, 8), "head": nn.Linear(8, 5)})
        net.forward = lambda x: net["head"](net["body"](x).relu())
        opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        for it in range(24):
            if it == 12:
                net["head"] = nn.Linear(8, 2)
                net["body"].requires_grad_(not frozen)
            loss = net(torch.randn(16, 6)).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    gc.disable()  # the old head must not need it
    try:
        (incident,) = guard(body).report.incidents
    finally:
        gc.enable()
    assert (incident.cause, incident.step, incident.module) == ("stale-parameters", 12, "head")


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_layer_in_the_middle_is_replaced_between_two_looks_at_all(optimizer: Any, guard: Guard) -> None:
    """The optimizer has written to its tensors in 21 iterations of the 24 in which it has to the others."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(12)))
        opt = optimizer(net.parameters(), lr=0.01)
        for it in range(48):
            if it == 21:
                net[5] = copy.deepcopy(net[5])
            loss = net(torch.randn(16, 6)).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    (incident,) = guard(body).report.incidents
    assert (incident.cause, incident.step, incident.module) == ("stale-parameters", 21, "5")


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.SGD])
def test_when_a_parameter_without_weight_decay_was_left(optimizer: Any) -> None:
    """The decay of the other group may be a write of its own to each of its weights."""
    decayed, scale = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(()))
    opt = optimizer([{"params": [decayed]}, {"params": [scale], "weight_decay": 0.0}], lr=0.01, weight_decay=0.01)
    watch = SimpleNamespace(ref=lambda: opt, versions=(0, {}))
    for step in range(12):
        for p in (decayed, scale):
            p.grad = torch.ones_like(p) if p is decayed or step < 8 else None
        opt.step()
        if step == 4:
            watch.versions = 4, {id(p): p._version for p in (decayed, scale)}
    assert left_at(watch, scale, [decayed, scale], 11) in ((8,) if optimizer is not torch.optim.SGD else (8, 11))


def test_naming_modules_leaves_no_garbage_that_holds_them() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    first = weakref.ref(net[0])
    gc.disable()
    try:
        compat.named_modules_of_user(net)
        net[0] = nn.Identity()
        assert first() is None
    finally:
        gc.enable()
