"""Layers that a script means to unfreeze in the middle of a run, and that stay frozen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]
THAWED, STEPS = 6, 40


def tuned(how: str, is_held: bool) -> None:
    """A backbone that is frozen at first. `is_held`: the optimizer holds it from the beginning."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("backbone", nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16)))
    model.add_module("head", nn.Linear(16, 4))
    backbone, head = model.backbone, model.head
    for p in backbone.parameters():
        p.requires_grad = False
    optimizer = torch.optim.SGD(model.parameters() if is_held else head.parameters(), lr=0.1)
    for step in range(STEPS):
        if step == THAWED:
            if how == "attribute":
                backbone.requires_grad = True
            elif how == "method":
                backbone.requires_grad_(True)
            if not is_held:
                optimizer.add_param_group({"params": list(backbone.parameters())})
        if how == "later" and step == THAWED + 3:
            backbone.requires_grad_(True)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,))).backward()
        optimizer.step()


@pytest.mark.parametrize(("how", "is_held"), [("attribute", False), ("attribute", True), ("nothing", False)])
def test_what_was_meant_to_train_is_told_once(guard: Guard, how: str, is_held: bool) -> None:
    run = guard(lambda: tuned(how, is_held))
    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.cause, incident.severity, incident.module) == ("unused-parameters", "warning", "backbone")
    assert ("underscore" in incident.explanation) == (how == "attribute")
    assert "backbone.requires_grad_(True)" in incident.fixes[0].how
    if is_held:  # (seen where the optimizer is looked at closely)
        assert THAWED <= incident.step < THAWED + 8
        assert "optimizer.step()" in incident.location.code
    else:
        assert incident.step == THAWED
        assert "add_param_group" in incident.location.code


@pytest.mark.parametrize(
    ("how", "is_held"), [("method", False), ("method", True), ("nothing", True), ("later", False), ("later", True)]
)
def test_what_trains_or_rests_on_purpose_is_nobodys_business(guard: Guard, how: str, is_held: bool) -> None:
    run = guard(lambda: tuned(how, is_held))
    assert run.faults == 0, run.stderr
    assert run.report.incidents == ()


def test_masters_that_join_are_trained_by_hand(guard: Guard) -> None:
    """float32 copies of the weights of a block that a half model grows: their gradients are handed to them."""

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).bfloat16()
        pairs = [(p, p.detach().float().clone()) for p in model.parameters()]
        optimizer = torch.optim.SGD([full for _, full in pairs], lr=0.05)
        for step in range(STEPS):
            if step == THAWED:
                block = nn.Linear(8, 8).bfloat16()
                model.insert(1, block)
                joined = [(p, p.detach().float().clone()) for p in block.parameters()]
                pairs += joined
                optimizer.add_param_group({"params": [full for _, full in joined]})
            out = model(torch.randn(16, 8, dtype=torch.bfloat16)).float()
            nn.functional.cross_entropy(out, torch.randint(4, (16,))).backward()
            with torch.no_grad():
                for half, full in pairs:
                    full.grad, half.grad = half.grad.float(), None
                optimizer.step()
                for half, full in pairs:
                    half.copy_(full)

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.report.incidents == ()
